"""The agent stopped and killed while it receives spans: acknowledged ones are stored once."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.real_engine.watching import engine_away, rows_once_there, times_seen
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.span_sender import SpanSender, request_span
from tests.real_parts.vllm import Vllm, span_request_id
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(1500)

SPANS_A_BATCH = 40
# Several at once, so that some batch is always between its receipt and its acknowledgement.
EXPORTERS = 4
PAUSE_S = 0.01

EITHER_END = pytest.mark.parametrize(
    "end",
    [
        pytest.param(AgentProcess.stop, id="SIGTERM"),
        pytest.param(AgentProcess.kill, id="kill -9"),
    ],
)


class Exporter:
    """Exports one batch after the other, each again and again until it is acknowledged."""

    def __init__(self, sender: SpanSender) -> None:
        self.sender = sender
        self._batch = _new_batch()

    def step(self) -> None:
        """One export."""
        if self.sender.export(self._batch):
            self._batch = _new_batch()


@contextmanager
def repeating(step: Callable[[], None]) -> Iterator[None]:
    """Do this over and over in another thread until the block ends."""
    ended = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not ended.wait(PAUSE_S):
                step()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert errors == []


def wait_for_more(seen: Callable[[], int], more: int) -> None:
    """Return when `seen` has grown by so many."""
    least = seen() + more
    eventually(lambda: seen() >= least, within_s=180, what=f"a count of {least}")


@contextmanager
def exporting(sender: SpanSender) -> Iterator[None]:
    """Batches are exported inside the block, and some were acknowledged at its start and end."""

    def wait_for_acknowledgements() -> None:
        wait_for_more(lambda: len(sender.acknowledged), 10 * SPANS_A_BATCH)

    with ExitStack() as exporters:
        for _ in range(EXPORTERS):
            exporters.enter_context(repeating(Exporter(sender).step))
        wait_for_acknowledgements()
        yield
        wait_for_acknowledgements()


def assert_stored_once(agent: AgentProcess, sender: SpanSender) -> None:
    """Every acknowledged span has one row; one without a response has at most one."""
    times = Counter(row["trace_id"] for row in agent.api.requests(limit="1000"))
    assert set(times.values()) == {1}
    assert sender.acknowledged <= times.keys() <= sender.sent


@EITHER_END
def test_acknowledged_spans_are_stored_once_after_a_restart_of_the_agent(
    end: Callable[[AgentProcess], None], tmp_path: Path
) -> None:
    ports = AgentPorts.free()
    sender = SpanSender(ports.grpc)
    sent_twice = _new_batch()
    settings = {"engines": [engine_away()]}
    with AgentProcess.with_settings(tmp_path, ports, settings) as agent:
        assert sender.export(sent_twice)
        with exporting(sender):
            end(agent)
            agent.start()
        assert sender.export(sent_twice)
        assert_stored_once(agent, sender)


@EITHER_END
def test_every_request_of_the_engine_has_one_row_although_the_agent_restarted(
    end: Callable[[AgentProcess], None], engine: Vllm, agent: AgentProcess
) -> None:
    finished: list[str] = []

    def step() -> None:
        request_id = f"{end.__name__}-{len(finished)}"
        engine.complete(request_id=request_id, max_tokens=3)
        finished.append(span_request_id(request_id))

    with repeating(step):
        wait_for_more(lambda: len(finished), 5)
        end(agent)
        wait_for_more(lambda: len(finished), 5)
        agent.start()
        wait_for_more(lambda: len(finished), 5)
    rows = rows_once_there(agent.api, finished)
    assert times_seen(rows, finished) == dict.fromkeys(finished, 1)


def _new_batch() -> list[Span]:
    return [request_span(f"wire-{position}") for position in range(SPANS_A_BATCH)]
