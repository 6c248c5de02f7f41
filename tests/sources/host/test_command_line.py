"""What an audit reads of an engine's processes."""

from pathlib import Path

import pytest

from agent.catalog import engine_facts as fact
from agent.sources.host.command_line import command_line, read_processes
from agent.sources.host.processes import ProcessLocator
from tests.sources.host.machine import PaperMachine

SOCKET = 999
HERE = ProcessLocator(port=8000)


@pytest.fixture
def machine(tmp_path: Path) -> PaperMachine:
    """A machine on which a socket listens on port 8000."""
    machine = PaperMachine(tmp_path)
    machine.listens({SOCKET: 8000})
    return machine


def test_flags_are_read_in_every_spelling() -> None:
    words = (
        "vllm serve m -tp 2 --pipeline_parallel_size=3 --enforce-eager --max-num-seqs 64 "
        "--otlp-traces-endpoint http://a:4317 --no-enable-prefix-caching -sc {} --api-key x"
    )
    line = command_line(words.split())
    assert line.flags == {
        "--tensor-parallel-size": "2",
        "--pipeline-parallel-size": "3",
        "--enforce-eager": "",
        "--otlp-traces-endpoint": "http://a:4317",
        "--no-enable-prefix-caching": "",
        "--speculative-config": "{}",
    }
    assert line.limits == {fact.MAX_RUNNING_REQUESTS.name: 64}
    assert line.whole


@pytest.mark.parametrize("words", ["--config file.yaml", "--config=file.yaml"])
def test_a_file_of_flags_leaves_the_others_open(words: str) -> None:
    assert not command_line(f"vllm serve m {words}".split()).whole


def test_the_front_is_read_before_the_script_that_started_it(machine: PaperMachine) -> None:
    machine.runs(40, flags=("start.sh", "--enforce-eager"))
    machine.runs(41, parent=40, sockets=(SOCKET,), flags=("-m", "vllm", "--shutdown-timeout", "9"))
    machine.runs(42, parent=41, title="VLLM::EngineCore")
    found = read_processes(HERE, 0.0, proc=machine.proc)
    assert found.pids == {41, 42}
    assert found.command_line is not None
    assert found.command_line.flags == {"--shutdown-timeout": "9"}
    assert found.addresses == frozenset({"127.0.0.1"})
    assert found.problem is None


@pytest.mark.parametrize("words", [("nginx",), ("-m", "http.server", "8000"), ()])
def test_the_flags_of_another_program_say_nothing(
    machine: PaperMachine, words: tuple[str, ...]
) -> None:
    machine.runs(41, sockets=(SOCKET,), flags=words)
    found = read_processes(HERE, 0.0, proc=machine.proc)
    assert found.command_line is None
    assert "shows vLLM's command line" in (found.problem or "")


def test_secrets_are_not_kept(machine: PaperMachine) -> None:
    machine.runs(41, sockets=(SOCKET,), flags=("-m", "vllm"))
    assert "secret" not in str(read_processes(HERE, 0.0, proc=machine.proc))


@pytest.mark.parametrize(
    ("locator", "problem"),
    [
        (HERE, "no visible process listens on port 8000"),
        (ProcessLocator(port=8000, same_machine=False), "not of this machine"),
    ],
)
def test_an_engine_that_cannot_be_seen_has_a_reason(
    machine: PaperMachine, locator: ProcessLocator, problem: str
) -> None:
    found = read_processes(locator, 0.0, proc=machine.proc)
    assert found.pids == frozenset()
    assert found.command_line is None
    assert found.addresses is None
    assert problem in (found.problem or "")


def test_without_a_proc_folder_there_is_a_reason(tmp_path: Path) -> None:
    assert "No such file" in (read_processes(HERE, 0.0, proc=tmp_path / "none").problem or "")
