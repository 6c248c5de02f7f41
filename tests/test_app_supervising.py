"""The supervisor keeps its processes running, and stops them group by group."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.real_parts.waiting import eventually

WITHIN_S = 60.0

# Parts that note what they do; one that comes `after` another waits for its note. `early` must
# have ended before `last` is asked to stop. At SIGHUP, `last` is stopped.
PARTS = """
import os, signal, sys, time
from pathlib import Path
from agent.app import supervising
from agent.app.supervising import ProcessPart, Running, Supervisor, Trial

log = Path(sys.argv[1])

def note(text):
    with log.open("a") as file:
        file.write(text + chr(10))

def noted(name):
    return log.exists() and f"{name} " in log.read_text()

def part(name, status=0, stubborn=False, later=0, after=None, stop=signal.SIGTERM, ends_s=0):
    def work():
        # Before the note: who read it may send the signal at once.
        if stubborn:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif not status:
            signal.pthread_sigmask(signal.SIG_BLOCK, {stop})
        status_now = later if later and noted(name) else status
        while after and not noted(after):
            time.sleep(0.01)
        note(f"{name} {os.getpid()}")
        if stubborn:
            signal.pause()
        if status_now:
            return status_now
        signal.sigwait({stop})
        time.sleep(ends_s)
        note(f"{name} stops")
        return 0
    return ProcessPart(name, work, stops_within_s=1.0, stop_signal=stop)

def reload(supervisor, plan):
    note(f"reload now with {plan.workers}")
    if sys.argv[2] == "stopped meanwhile":
        os.kill(os.getpid(), signal.SIGTERM)
        supervisor.stop_last()
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    if sys.argv[2] == "fails":
        raise OSError("there is no interpreter")

left = None
if sys.argv[2] == "left":
    if not (pid := os.fork()):
        part("left").work()
        os._exit(0)
    left = [Running(part("again"), pid)]
# What the trials do, one after the other.
trials = iter(Path(f"{log}.trials").read_text().splitlines())
supervising.TRY_WITHIN_S = 3.0

def begin_trial():
    note("trial now")
    if sys.argv[2] == "no interpreter":
        return Trial(["/no/interpreter"], os.environ)
    return Trial([sys.executable, "-c", next(trials)], os.environ)

groups = [eval(group) for group in sys.argv[3:]]
sys.exit(Supervisor(groups, begin_trial, reload, left).run())
"""


class Supervised:
    """A supervisor, and the lines that its parts wrote."""

    def __init__(self, log: Path, process: "subprocess.Popen[bytes]") -> None:
        self._log = log
        self.process = process

    def lines(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def pid(self, name: str, start: int = 0) -> int:
        """The process of a part, after this many earlier starts."""

        def started() -> list[str]:
            lines = [line.split() for line in self.lines() if line.count(" ") == 1]
            return [pid for part, pid in lines if part == name and pid != "stops"][start:]

        return int(eventually(started, within_s=WITHIN_S, what=f"start {start} of {name}")[0])

    def status_after(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(WITHIN_S)


SUCCEEDS = 'print(\'{"proxy": null, "workers": 7}\')'


@contextmanager
def supervising(
    folder: Path, *groups: str, way: str = "", trials: Sequence[str] = (SUCCEEDS,)
) -> Iterator[Supervised]:
    log = folder / "parts.log"
    Path(f"{log}.trials").write_text("\n".join(trials))
    command = [sys.executable, "-c", PARTS, str(log), way, *groups]
    # A session of its own, as in a terminal: Ctrl-C reaches every process of it.
    with (
        (folder / "stderr").open("wb") as stderr,
        subprocess.Popen(command, start_new_session=True, stderr=stderr) as process,
    ):
        try:
            yield Supervised(log, process)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def test_a_part_that_is_killed_is_started_again_and_the_others_go_on(tmp_path: Path) -> None:
    with supervising(tmp_path, "[part('early')]", "[part('last')]") as supervised:
        early, last = supervised.pid("early"), supervised.pid("last")
        os.kill(early, signal.SIGKILL)
        assert supervised.pid("early", 1) != early
        assert psutil.pid_exists(last)
        assert supervised.status_after(signal.SIGTERM) == 0


# Ctrl-C comes to each process of a terminal, and systemd's SIGTERM to each of a service.
@pytest.mark.parametrize(
    ("send", "number"),
    [(os.kill, signal.SIGTERM), (os.killpg, signal.SIGTERM), (os.killpg, signal.SIGINT)],
)
def test_a_group_is_stopped_when_the_groups_before_it_have_ended(
    tmp_path: Path, send: Callable[[int, int], None], number: signal.Signals
) -> None:
    groups = "[part('a', ends_s=0.2), part('b')]", "[part('last', stop=signal.SIGUSR1)]"
    with supervising(tmp_path, *groups) as supervised:
        for name in ("a", "b", "last"):
            supervised.pid(name)
        send(supervised.process.pid, number)
        assert supervised.process.wait(WITHIN_S) == 0
        *first, last = [line for line in supervised.lines() if line.endswith("stops")]
        assert (sorted(first), last) == (["a stops", "b stops"], "last stops")


def test_a_part_that_does_not_stop_in_time_is_killed(tmp_path: Path) -> None:
    with supervising(tmp_path, "[part('hung', stubborn=True)]", "[part('last')]") as supervised:
        hung = supervised.pid("hung")
        supervised.pid("last")
        assert supervised.status_after(signal.SIGTERM) == 0
        # Once the system has buried it.
        eventually(lambda: not psutil.pid_exists(hung), within_s=WITHIN_S, what="its end")
        assert supervised.lines()[-1] == "last stops"


def test_a_part_with_invalid_settings_ends_all(tmp_path: Path) -> None:
    ending = "[part('last', status=2, after='early')]"
    with supervising(tmp_path, "[part('early')]", ending) as supervised:
        supervised.pid("early")
        assert supervised.process.wait(WITHIN_S) == 2
        assert supervised.lines()[-1] == "early stops"


def test_a_part_that_fails_otherwise_is_tried_again(tmp_path: Path) -> None:
    with supervising(tmp_path, "[part('failing', status=1)]") as supervised:
        assert supervised.pid("failing", 2)
        assert supervised.process.poll() is None


def test_settings_that_become_invalid_end_no_other_part(tmp_path: Path) -> None:
    with supervising(tmp_path, "[part('early')]", "[part('last', later=2)]") as supervised:
        early = supervised.pid("early")
        os.kill(supervised.pid("last"), signal.SIGKILL)
        assert supervised.pid("last", 2)
        assert psutil.pid_exists(early)
        assert supervised.status_after(signal.SIGTERM) == 0


def test_a_stop_during_a_reload_is_not_forgotten(tmp_path: Path) -> None:
    parts = ("[part('early')]", "[part('last', stubborn=True)]")
    with supervising(tmp_path, *parts, way="stopped meanwhile") as supervised:
        last = supervised.pid("last")
        assert supervised.status_after(signal.SIGHUP) == 0
        *_, begins, ends = supervised.lines()
        assert (begins, ends) == ("reload now with 7", "early stops")
        assert not psutil.pid_exists(last)


def test_processes_of_an_earlier_run_are_stopped_with_the_first_group(tmp_path: Path) -> None:
    with supervising(tmp_path, "[part('early')]", "[part('last')]", way="left") as supervised:
        eventually(lambda: len(supervised.lines()) == 3, within_s=WITHIN_S, what="three parts")
        assert supervised.status_after(signal.SIGTERM) == 0
        *first, last = [line for line in supervised.lines() if line.endswith("stops")]
        assert (sorted(first), last) == (["early stops", "left stops"], "last stops")


def test_the_work_of_an_earlier_process_that_is_killed_is_done_until_it_succeeds(
    tmp_path: Path,
) -> None:
    with supervising(tmp_path, "[part('early')]", "[part('last')]", way="left") as supervised:
        os.kill(supervised.pid("left"), signal.SIGKILL)
        os.kill(supervised.pid("again"), signal.SIGKILL)
        os.kill(supervised.pid("again", 1), signal.SIGTERM)
        # It is done: others are started again and again, and it is not.
        for start in range(4):
            os.kill(supervised.pid("early", start), signal.SIGKILL)
        supervised.pid("early", 4)
        assert supervised.status_after(signal.SIGTERM) == 0
        assert [line.split()[0] for line in supervised.lines()].count("again") == 3
        assert supervised.lines().count("again stops") == 1


FAILURES = {
    "raise RuntimeError('half upgraded')": (
        'RuntimeError: half upgraded (File "<string>", line 1, in <module>)'
    ),
    "import sys; sys.exit('goodput-agent: listen: is wrong' + chr(10) + 'proxy: too')": (
        "listen: is wrong; proxy: too"
    ),
    "import os; os.kill(os.getpid(), 9)": "it ended with -9",
    "print('no plan')": "it ended with 0",
    "import time; time.sleep(1000)": "it did not start within 3 s",
}


def test_a_trial_that_fails_changes_nothing_and_the_log_says_why(tmp_path: Path) -> None:
    parts = ("[part('early')]", "[part('last')]")
    with supervising(tmp_path, *parts, trials=list(FAILURES)) as supervised:
        pids = [supervised.pid(name) for name in ("early", "last")]
        for why in FAILURES.values():
            supervised.process.send_signal(signal.SIGHUP)
            sentence = f"the new agent cannot start, so nothing changes: {why}\n"
            eventually(
                partial(is_in, sentence, tmp_path / "stderr"), within_s=WITHIN_S, what=sentence
            )
        assert all(map(psutil.pid_exists, pids))
        assert supervised.status_after(signal.SIGTERM) == 0
        assert sum(line.startswith("early ") for line in supervised.lines()) == 2


def is_in(text: str, file: Path) -> bool:
    return text in file.read_text()


def test_a_supervisor_restarts_and_stops_its_parts_while_a_trial_hangs(tmp_path: Path) -> None:
    hangs = f"import time; open({str(tmp_path / 'hangs')!r}, 'w'); time.sleep(1000)"
    with supervising(tmp_path, "[part('early')]", trials=[hangs]) as supervised:
        early = supervised.pid("early")
        supervised.process.send_signal(signal.SIGHUP)
        eventually((tmp_path / "hangs").exists, within_s=WITHIN_S, what="the trial")
        os.kill(early, signal.SIGKILL)
        supervised.pid("early", 1)
        assert supervised.status_after(signal.SIGTERM) == 0
        assert not [line for line in supervised.lines() if line.startswith("reload")]


def test_the_last_of_several_reloads_counts(tmp_path: Path) -> None:
    trials = ["import time; time.sleep(1000)", SUCCEEDS]
    with supervising(tmp_path, "[part('early')]", trials=trials) as supervised:
        supervised.pid("early")
        for begun in (1, 2):
            supervised.process.send_signal(signal.SIGHUP)
            trial = partial(has_begun, supervised, begun)
            eventually(trial, within_s=WITHIN_S, what=f"trial {begun}")
        reloads = "reload now with 7"
        eventually(lambda: reloads in supervised.lines(), within_s=WITHIN_S, what="the reload")
        # One that returns changes nothing.
        assert supervised.status_after(signal.SIGTERM) == 0
        starts = [line for line in supervised.lines() if line.startswith("early")]
        assert len(starts) == 2


def has_begun(supervised: Supervised, trials: int) -> bool:
    return supervised.lines().count("trial now") == trials


def test_a_reload_without_an_interpreter_changes_nothing(tmp_path: Path) -> None:
    with supervising(tmp_path, "[part('early')]", way="no interpreter") as supervised:
        supervised.pid("early")
        supervised.process.send_signal(signal.SIGHUP)
        said = partial(is_in, "no new agent can be tried", tmp_path / "stderr")
        eventually(said, within_s=WITHIN_S, what="the reason")
        assert supervised.status_after(signal.SIGTERM) == 0


def test_a_supervisor_that_fails_stops_its_parts(tmp_path: Path) -> None:
    parts = ("[part('early')]", "[part('last')]")
    with supervising(tmp_path, *parts, way="fails") as supervised:
        for name in ("early", "last"):
            supervised.pid(name)
        assert supervised.status_after(signal.SIGHUP) == 1
        stops = [line for line in supervised.lines() if line.endswith("stops")]
        assert stops == ["early stops", "last stops"]
