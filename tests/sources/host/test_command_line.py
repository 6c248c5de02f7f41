"""The command line of an engine: its limits, and what an audit reads of its processes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.catalog import engine_facts as fact
from agent.sources.host.command_line import command_line, read_processes
from agent.sources.host.flags import limits_given
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


# Limits

RUNNING, STEP = fact.MAX_RUNNING_REQUESTS.name, fact.MAX_STEP_TOKENS.name
CONTEXT = fact.MAX_CONTEXT_TOKENS.name


@pytest.mark.parametrize(
    ("line", "limits"),
    [
        ("vllm serve m --max-num-seqs 64", {RUNNING: 64}),
        ("vllm serve m --max-num-seqs=64 --max-num-batched-tokens=8192", {RUNNING: 64, STEP: 8192}),
        ("python -m vllm.x --max_num_seqs 64 --max_model_len=4096", {RUNNING: 64, CONTEXT: 4096}),
        ("vllm serve m --max-model-len 1k", {CONTEXT: 1000}),
        ("vllm serve m --max-model-len 25.6k", {CONTEXT: 25600}),
        ("vllm serve m --max-model-len 128K", {CONTEXT: 131072}),
        ("vllm serve m --max-num-batched-tokens 1M", {STEP: 1048576}),
        ("vllm serve m --max-num-seqs 64 --max-num-seqs 32", {RUNNING: 32}),
        ("vllm serve m --max-num-seqs 64 --max-num-active-seqs 16", {RUNNING: 16}),
        ("vllm serve m --max-num-scheduled-tokens 99 --max-num-batched-tokens 100", {STEP: 99}),
    ],
)
def test_a_limit_that_was_given_is_known(line: str, limits: dict[str, int]) -> None:
    assert limits_given(line.split()) == limits


@pytest.mark.parametrize(
    "line",
    [
        "",
        "vllm serve m",
        "vllm serve m --max-model-len auto",
        "vllm serve m --max-model-len -1",
        "vllm serve m --max-num-seqs",
        "vllm serve m --max-num-seqs --api-key",
        "vllm serve m --max-num-seqs= 64",
        "vllm serve m --max-num-seqs 0",
        "vllm serve m --max-model-len 1.5K",
        "vllm serve m --max-num-seqs-of-others 64",
        "vllm serve m --no-max-num-seqs 64",
    ],
)
def test_what_was_not_given_as_a_number_is_not_guessed(line: str) -> None:
    assert limits_given(line.split()) == {}


@given(st.lists(st.text() | st.sampled_from(["--max-num-seqs", "--max-model-len=", "5k"])))
def test_any_words_are_read(words: list[str]) -> None:
    assert all(limit > 0 for limit in limits_given(words).values())
