"""Causes of misses, made for real on an engine: traffic, and a processor that is taken away."""

import json
import os
import socket
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from http.client import HTTPConnection
from itertools import cycle
from pathlib import Path
from random import Random
from subprocess import Popen
from threading import Event, Lock
from typing import Any
from urllib.parse import urlsplit

import psutil

from agent.catalog.causes import Cause
from tests.real_parts.vllm import ANSWER_WITHIN_S, Vllm

_GROUPS = Path("/sys/fs/cgroup/cpu")
_PERIOD_US = 100_000


@contextmanager
def processors_limited(pid: int, limit: float, *, burners: int) -> Iterator[None]:
    """This process and its children have so many processors, or a part of one, inside the block.

    By a cgroup's quota, as a container's limit does it; where none can be made, beside programs
    that take the one processor on which all of them have to run.
    """
    pids = _with_children(pid)
    group = _GROUPS / f"goodput-agent-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        with _beside_burners(pids, burners):
            yield
    else:
        with _in_group(group, pids, limit):
            yield


def processors_used(pid: int, during: Callable[[], object]) -> float:
    """How many processors this process and its children use while `during` runs."""
    pids, began_s = _with_children(pid), time.monotonic()
    before_s = sum(map(_processor_s, pids))
    during()
    return (sum(map(_processor_s, pids)) - before_s) / (time.monotonic() - began_s)


def _processor_s(pid: int) -> float:
    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system)


def _with_children(pid: int) -> list[int]:
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


@contextmanager
def _in_group(group: Path, pids: Sequence[int], limit: float) -> Iterator[None]:
    (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(round(limit * _PERIOD_US)))
    before = _GROUPS / _group_of(pids[0]) / "cgroup.procs"
    try:
        _move(pids, group / "cgroup.procs")
        yield
    finally:
        _move(pids, before)
        group.rmdir()


def _group_of(pid: int) -> str:
    """The path of a process' cgroup of processors, below all of them."""
    lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii").splitlines()
    groups = (line.split(":", 2) for line in lines)
    return next(path.strip("/") for _, names, path in groups if "cpu" in names.split(","))


def _move(pids: Sequence[int], members: Path) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            members.write_text(str(pid))


@contextmanager
def _beside_burners(pids: Sequence[int], count: int) -> Iterator[None]:
    allowed = os.sched_getaffinity(pids[0])
    one = {max(allowed)}
    burners = [Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        for burner in burners:
            os.sched_setaffinity(burner.pid, one)
        _pin(pids, one)
        yield
    finally:
        _pin(pids, allowed)
        for burner in burners:
            burner.kill()
            burner.wait()


def _pin(pids: Sequence[int], processors: set[int]) -> None:
    """Let all threads of these processes run on these processors alone."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), processors)


# Token ids that the tiny model's tokenizer has.
_IDS = range(100, 1900)
# Of a usual prompt the prefix cache has nearly all: seven blocks of 128 tokens.
PREFIXES = [Random(seed).choices(_IDS, k=900) for seed in range(30)]
USUAL_PROMPT, USUAL_OUTPUT, CLIENTS = 1000, 12, 6
STEADY_OUTPUT, STEADY_CLIENTS = 120, 4
# Prompts of a middle length show what a prompt token takes.
_NEW, _NEW_PROMPT = 0.15, 400
_PAUSE_S = 0.3
# A network has smaller segments than loopback, for which the kernel would buffer megabytes.
_SEGMENT, _RECEIVE_BUFFER = 1400, 4096
_NEVER = Event()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client saw of one response, or may at most see of it, in seconds."""

    ttft_s: float
    tpot_s: float
    e2e_s: float

    def misses(self, limits: "Asked") -> bool:
        """Whether it took longer than the limits allow."""
        within = zip(astuple(self), astuple(limits), strict=True)
        return any(seen_s > limit_s for seen_s, limit_s in within)


class Traffic:
    """Clients of one engine, perhaps behind a proxy.

    `asked` counts their requests by name, and `answered` has what they saw of each.
    """

    def __init__(self, url: str, model: str) -> None:
        self.asked: Counter[str] = Counter()
        self.answered: dict[str, list[Asked]] = defaultdict(list)
        self._place = urlsplit(url).netloc
        self._model = model
        self._random = Random(0)
        self._prefixes = cycle(PREFIXES)
        self._lock = Lock()

    def new_prompt(self, tokens: int) -> list[int]:
        """A prompt that no cache has."""
        return [self._random.choice(_IDS) for _ in range(tokens)]

    def usual_prompt(self) -> list[int]:
        """A prompt of which the prefix cache has nearly all, once each prefix was asked."""
        return self.prompt_after(next(self._prefixes))

    def prompt_after(self, prefix: list[int]) -> list[int]:
        """A prompt of the usual length that begins so."""
        return prefix + self.new_prompt(USUAL_PROMPT - len(prefix))

    def ask(self, name: str, prompt: list[int], tokens: int, **fields: Any) -> Asked:
        """One streamed completion, read to its end; its id begins with the name."""
        head, body = self._request(name, {"prompt": prompt, "max_tokens": tokens, **fields})
        connection = HTTPConnection(self._place, timeout=ANSWER_WITHIN_S)
        began_s = time.monotonic()
        connection.request("POST", "/v1/completions", body, head)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.read(1)
        first_s = time.monotonic()
        while response.read1(65536):
            pass
        ended_s = time.monotonic()
        connection.close()
        return self._note(name, tokens, first_s - began_s, ended_s - first_s)

    def chat_slowly(self, name: str, asked: Mapping[str, Any], stall_s: float) -> None:
        """One streamed chat whose client stops to read for a while after the first bytes."""
        host, port = self._place.split(":")
        head, body = self._request(name, asked)
        head |= {"Host": self._place, "Content-Length": str(len(body)), "Connection": "close"}
        lines = "".join(f"{key}: {value}\r\n" for key, value in head.items())
        with socket.socket() as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
            client.settimeout(ANSWER_WITHIN_S)
            client.connect((host, int(port)))
            began_s = time.monotonic()
            client.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{lines}\r\n".encode() + body)
            assert client.recv(1024).startswith(b"HTTP/1.1 200")
            first_s = time.monotonic()
            _NEVER.wait(stall_s)
            while client.recv(65536):
                pass
            ended_s = time.monotonic()
        self._note(name, asked["max_tokens"], first_s - began_s, ended_s - first_s)

    def _note(self, name: str, tokens: int, ttft_s: float, rest_s: float) -> Asked:
        seen = Asked(ttft_s, rest_s / max(1, tokens - 1), ttft_s + rest_s)
        self.answered[name].append(seen)
        return seen

    def _request(self, name: str, asked: Mapping[str, Any]) -> tuple[dict[str, str], bytes]:
        """The headers and the body of a request; no two have one id."""
        with self._lock:
            self.asked[name] += 1
            request_id = f"{name}-{self.asked[name]}"
        body = {"model": self._model, "stream": True, "ignore_eos": True, **asked}
        head = {
            "X-Request-Id": request_id,
            "Content-Type": "application/json",
            # Of each key the agent makes a tenant.
            "Authorization": f"Bearer {NEWCOMER if name == NEWCOMER else 'usual'}",
        }
        return head, json.dumps(body).encode()


def at_once(count: int, ask: Callable[[int], object], *, apart_s: float = 0.0) -> None:
    """Call `ask` with each number, each in a thread of its own, which start a little apart."""

    def begin(number: int) -> None:
        _NEVER.wait(apart_s * number)
        ask(number)

    with ThreadPoolExecutor(count) as clients:
        list(clients.map(begin, range(count)))


def for_a_while(
    for_s: float,
    clients: int,
    ask: Callable[[], Asked],
    *,
    pause_s: float = 0.0,
    at_least: int = 1,
    apart_s: float = 0.0,
) -> list[Asked]:
    """Each of several clients calls `ask` again and again, as long and as often as is said."""
    until = time.monotonic() + for_s
    answered: list[Asked] = []

    def client(_: int) -> None:
        while time.monotonic() < until or len(answered) < at_least:
            answered.append(ask())
            _NEVER.wait(pause_s)

    at_once(clients, client, apart_s=apart_s)
    return answered


def usual(
    traffic: Traffic,
    for_s: float,
    name: str = "usual",
    *,
    clients: int = CLIENTS,
    at_least: int = 1,
) -> list[Asked]:
    """Prompts that the prefix cache has, with a few tokens of output; some prompts are new."""

    def ask() -> Asked:
        new = Random().random() < _NEW
        prompt = traffic.new_prompt(_NEW_PROMPT) if new else traffic.usual_prompt()
        return traffic.ask(name, prompt, USUAL_OUTPUT)

    return for_a_while(for_s, clients, ask, pause_s=_PAUSE_S, at_least=at_least)


def short(
    traffic: Traffic,
    for_s: float,
    name: str = "usual",
    *,
    clients: int = CLIENTS,
    longer: float = 0.0,
) -> list[Asked]:
    """Short prompts, which no cache has, with a few tokens of output; some are longer."""

    def ask() -> Asked:
        tokens = _NEW_PROMPT if Random().random() < longer else 16
        return traffic.ask(name, traffic.new_prompt(tokens), USUAL_OUTPUT)

    return for_a_while(for_s, clients, ask, pause_s=_PAUSE_S)


def steady(traffic: Traffic, for_s: float, name: str, *, at_least: int = 1) -> list[Asked]:
    """Short prompts with long responses, one after another."""

    def ask() -> Asked:
        return traffic.ask(name, traffic.new_prompt(16), STEADY_OUTPUT)

    return for_a_while(for_s, STEADY_CLIENTS, ask, at_least=at_least)


# As many are made of each fault at least, if the machine is slow.
AT_LEAST = 24
LONG_PROMPT, PACK = 1900, 6
WORDS = 2500
SURGE = 60
STALLED = 20
STAND_S, BETWEEN_S = 0.5, 0.7
SLOWER = 0.3
NEWCOMER, NEWCOMERS = "newcomer", 4


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a fault is made, and how many times as large if it can be without being another."""

    traffic: Traffic
    engine: Vllm
    times: int = 1


def long_prompts(scene: Scene) -> None:
    """Packs of long prompts between short ones."""
    traffic = scene.traffic

    def ask_long(_: int) -> Asked:
        return traffic.ask("long", traffic.new_prompt(LONG_PROMPT), 2)

    def pack() -> Asked:
        at_once(PACK * scene.times - 1, ask_long)
        return ask_long(0)

    def client(number: int) -> None:
        if number:
            short(traffic, 5.0, "between", longer=0.15)
        else:
            for_a_while(5.0, 1, pack, pause_s=0.7)

    at_once(2, client)


def cache_misses(scene: Scene) -> None:
    """Usual prompts after the cache lost all it had: one of each prefix.

    Clients and responses are the usual ones, so that nothing else is another cause. So few are
    asked that what the cache usually has of a prompt stays what it was.
    """
    traffic = scene.traffic
    clients = CLIENTS * scene.times
    scene.engine.forget_prefixes()

    def client(number: int) -> None:
        for prefix in PREFIXES[number::clients]:
            traffic.ask("cache", traffic.prompt_after(prefix), USUAL_OUTPUT)

    at_once(clients, client, apart_s=0.1)


def slow_grammar(scene: Scene) -> None:
    """Grammars that take long to compile, each another one."""
    traffic = scene.traffic

    def ask() -> Asked:
        grammar = {"choice": [str(traffic.new_prompt(3)) for _ in range(WORDS * scene.times)]}
        return traffic.ask(
            "grammar", traffic.usual_prompt(), USUAL_OUTPUT, structured_outputs=grammar
        )

    for_a_while(3.0, 4, ask, at_least=AT_LEAST)


def short_of_cpu(scene: Scene) -> None:
    """Usual requests while the engine has little of a processor."""
    with processors_limited(scene.engine.front_pid, 0.25, burners=6):
        usual(scene.traffic, 3.0, "cpu", clients=8, at_least=AT_LEAST)


def slower_steps(scene: Scene) -> None:
    """Long responses while the engine has less of the processors than they take it."""
    pid = scene.engine.front_pid
    used = processors_used(pid, lambda: steady(scene.traffic, 1.0, "steady"))
    limit = used / (1.0 + SLOWER * scene.times)
    with processors_limited(pid, limit, burners=1):
        steady(scene.traffic, 2.0, "slower", at_least=AT_LEAST)


def stalls(scene: Scene) -> None:
    """Usual requests while the engine stands still for half a second now and then."""
    over = Event()

    def stall() -> None:
        while not over.wait(BETWEEN_S):
            with scene.engine.standing_still():
                _NEVER.wait(STAND_S * scene.times)

    with ThreadPoolExecutor(1) as beside:
        stalling = beside.submit(stall)
        try:
            usual(scene.traffic, 5.0, "stalled")
        finally:
            over.set()
        stalling.result()


def new_tenant(scene: Scene) -> None:
    """Usual requests beside those of another tenant, as long, whose prompts no cache ever had."""
    traffic = scene.traffic

    def ask() -> Asked:
        return traffic.ask(NEWCOMER, traffic.new_prompt(USUAL_PROMPT), USUAL_OUTPUT)

    def client(number: int) -> None:
        if number:
            usual(traffic, 4.0, "neighbour", clients=3)
        else:
            for_a_while(4.0, NEWCOMERS * scene.times, ask)

    at_once(2, client)


def slow_clients(scene: Scene) -> None:
    """Clients that do not read for a while, of responses larger than what lies in between holds."""
    asked = {
        "messages": [{"role": "user", "content": "hogonu bari"}],
        "max_tokens": 24,
        "logprobs": True,
        "top_logprobs": 200,
    }
    stall_s = 5.0 * scene.times

    def ask(_: int) -> None:
        scene.traffic.chat_slowly("slow", asked, stall_s=stall_s)

    at_once(STALLED, ask, apart_s=0.15)


def surge(scene: Scene) -> None:
    """Many usual requests at once."""
    traffic = scene.traffic

    def ask(_: int) -> Asked:
        return traffic.ask("surge", traffic.usual_prompt(), 2 * USUAL_OUTPUT)

    at_once(SURGE * scene.times, ask)


def little(traffic: Traffic, name: str) -> Asked:
    """A request of two blocks of the KV cache."""
    return traffic.ask(name, traffic.new_prompt(48), 16)


def growing(traffic: Traffic, name: str) -> Asked:
    """A request of four blocks that grows to nine."""
    return traffic.ask(name, traffic.new_prompt(100), 160)


def few_places(scene: Scene) -> None:
    """Four times as many clients as there are places."""
    for_a_while(2.0, 32 * scene.times, lambda: little(scene.traffic, "places"))


def tiny_kv(scene: Scene) -> None:
    """More prompts than fit into the KV cache, and they grow there."""
    clients = 16 * scene.times
    for_a_while(4.0, clients, lambda: growing(scene.traffic, "kv"), apart_s=0.12, at_least=AT_LEAST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault, the names of its requests, and the causes that are true of them.

    `coarser` ones are true, too, where a more exact cause cannot be seen. What is not `in_engine`
    the engine itself does not feel. A `slight` one is no larger than what other programs change.
    """

    name: str
    make: Callable[[Scene], None]
    of: tuple[str, ...]
    causes: frozenset[Cause]
    coarser: frozenset[Cause] = field(default=frozenset())
    in_engine: bool = True
    slight: bool = False


_PREFILL = frozenset(
    {
        *(Cause.LONG_PROMPT, Cause.PREFILL_BACKLOG),
        *(Cause.PREFILL_CONTENTION, Cause.PREFILL_INTERFERENCE),
    }
)
LONG_PROMPTS = Fault(
    name="long prompts", make=long_prompts, of=("long", "between"), causes=_PREFILL
)
SLOW_CLIENTS = Fault(
    name="slow clients",
    make=slow_clients,
    of=("slow",),
    causes=frozenset({Cause.SLOW_CLIENT}),
    in_engine=False,
)
# The surge is the last: samples of a second show its requests also to those that come next.
OTHERS = (
    Fault(
        name="cache misses",
        make=cache_misses,
        of=("cache",),
        causes=frozenset({Cause.CACHE_MISS}),
        coarser=_PREFILL,
    ),
    Fault(
        name="slow grammar",
        make=slow_grammar,
        of=("grammar",),
        causes=frozenset({Cause.GRAMMAR, Cause.DEFERRED}),
    ),
    Fault(
        name="stalls",
        make=stalls,
        of=("stalled",),
        causes=frozenset({Cause.STALL, Cause.UNEXPLAINED}),
    ),
    Fault(
        name="slower steps",
        make=slower_steps,
        of=("slower",),
        causes=frozenset({Cause.CPU_STARVED, Cause.UNEXPLAINED}),
        slight=True,
    ),
    Fault(
        name="new tenant",
        make=new_tenant,
        of=(NEWCOMER, "neighbour"),
        causes=_PREFILL | {Cause.BURST, Cause.BATCH_LOAD},
    ),
    Fault(name="CPU short", make=short_of_cpu, of=("cpu",), causes=frozenset({Cause.CPU_STARVED})),
    Fault(
        name="queue surge",
        make=surge,
        of=("surge",),
        causes=frozenset({Cause.BURST}),
        # More come at once than there are places.
        coarser=frozenset({Cause.SEQUENCE_CAP}),
    ),
)
FEW_PLACES = Fault(
    name="few places", make=few_places, of=("places",), causes=frozenset({Cause.SEQUENCE_CAP})
)
TINY_KV = Fault(
    name="tiny KV cache",
    make=tiny_kv,
    of=("kv",),
    causes=frozenset({Cause.KV_PRESSURE, Cause.PREEMPTION}),
)
