"""What the plugin makes of vLLM's counts, and that nothing of it reaches the engine."""

import asyncio
import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from goodput_agent_vllm import hooks
from goodput_agent_vllm.datagrams import HEADER
from goodput_agent_vllm.reporting import MAX_ERRORS, Reporter
from goodput_agent_vllm.sending import DATAGRAM_BYTES, WAITING_DATAGRAMS, Sender

from agent.sources.plugin_records import PluginRecords, read_datagram
from tests.plugins.vllm_counts import NOW, aborted_state, finished, iteration, scheduler

# What the plugin logs when it switches itself off.
OFF = "is now off"


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as opened:
        opened.bind(str(tmp_path / "agent.sock"))
        opened.setblocking(False)
        yield opened


@pytest.fixture
def sender(listening: socket.socket) -> Iterator[Sender]:
    with closing(Sender(listening.getsockname(), pause_s=0.0)) as opened:
        yield opened


@pytest.fixture
def reporter(sender: Sender) -> Reporter:
    return Reporter(sender, now=lambda: NOW)


def received(listening: socket.socket) -> list[PluginRecords]:
    contents: list[PluginRecords] = []
    while True:
        try:
            content = read_datagram(listening.recv(65_536), "chat-0", NOW)
        except BlockingIOError:
            return contents
        assert content is not None
        assert not content.refused
        contents.append(content)


def test_a_step_has_the_counts_of_vllm(listening: socket.socket, reporter: Reporter) -> None:
    reporter.step(scheduler(), iteration(at=NOW - 1.5), 3)
    reporter.step(scheduler(), iteration(at=NOW), 3)
    (_, content) = received(listening)
    (step,) = content.steps
    assert (step.engine, step.ended_at, step.duration_s, step.rank) == ("chat-0", NOW, 1.5, 3)
    # Seven tokens, of which one is the first of its request.
    assert (step.prefill_tokens, step.decode_tokens) == (68, 6)
    assert (step.running, step.waiting_capacity, step.waiting_deferred) == (2, 3, 4)
    assert (step.waiting_kv_transfer, step.kv_usage, step.preempted) == (3, 0.25, 1)
    assert step.tokens_of_step is False


def test_the_beams_of_a_search_are_no_requests(
    listening: socket.socket, reporter: Reporter
) -> None:
    beams = [f"chatcmpl-x-0123456789abcdef-beam-{number}" for number in (0, 10)]
    others = ["chatcmpl-beam-1", "chatcmpl-x-0123456789abcdef-beam-1-0"]
    reporter.step(None, iteration(*(finished(request_id=each) for each in [*beams, *others])), 0)
    left = aborted_state()
    left.external_req_id = beams[0]
    reporter.aborted(left)
    ended = [each.request_id for content in received(listening) for each in content.ended]
    assert ended == others


def test_a_step_has_the_time_since_the_last_of_its_rank_unless_that_was_idle(
    listening: socket.socket, reporter: Reporter
) -> None:
    idle = scheduler(num_running_reqs=0, num_waiting_reqs=0)
    reporter.step(idle, iteration(at=NOW - 9), 0)
    for rank, at in ((0, NOW - 4), (1, NOW - 3), (0, NOW - 2), (1, NOW)):
        reporter.step(scheduler(), iteration(at=at), rank)
    reporter.step(scheduler(), None, 0)
    durations = [step.duration_s for content in received(listening) for step in content.steps]
    assert durations == [None, None, None, 2.0, 3.0, 2.0]


def test_vllms_own_measure_of_a_step_is_better(
    listening: socket.socket, reporter: Reporter
) -> None:
    details = SimpleNamespace(elapsed_ms=40.0, num_ctx_tokens=512, num_generation_tokens=9)
    reporter.step(scheduler(iteration_details=details), iteration(), 0)
    (content,) = received(listening)
    (step,) = content.steps
    assert (step.duration_s, step.prefill_tokens, step.decode_tokens) == (0.04, 512, 9)
    assert step.tokens_of_step is True


def test_an_api_server_among_several_reports_requests_alone(
    listening: socket.socket, reporter: Reporter
) -> None:
    reporter.whole_steps = False
    reporter.step(scheduler(), iteration(finished()), 0)
    (content,) = received(listening)
    assert content.steps == []
    assert [ended.request_id for ended in content.ended] == ["chatcmpl-1"]


def test_an_ended_request_has_the_figures_of_vllm(
    listening: socket.socket, reporter: Reporter
) -> None:
    reporter.step(None, iteration(finished(goodput_ttft_s=0.9)), 0)
    (content,) = received(listening)
    (ended,) = content.ended
    assert ended.ended_at == NOW
    assert (ended.request_id, ended.finish_reason) == ("chatcmpl-1", "stop")
    assert (ended.input_tokens, ended.output_tokens, ended.cached_tokens) == (100, 11, 32)
    assert (ended.queue_s, ended.prefill_s, ended.decode_s) == (0.25, 0.5, 1.0)
    assert (ended.e2e_s, ended.ttft_s, ended.preemptions) == (2.0, 0.9, 1)


def test_a_request_that_never_ran_has_no_phases(
    listening: socket.socket, reporter: Reporter
) -> None:
    """vLLM subtracts its times from a scheduling at 0, the start of the machine."""
    never = finished(
        finish_reason="abort", queued_time=-5e4, prefill_time=5e4, num_generation_tokens=0
    )
    reporter.step(None, iteration(never), 0)
    (content,) = received(listening)
    (ended,) = content.ended
    assert ended.queue_s is ended.prefill_s is ended.decode_s is ended.ttft_s is None
    assert ended.cached_tokens is None
    assert ended.e2e_s == 2.0


class Processor:
    """The parts of `OutputProcessor` that aborts touch."""

    def __init__(self) -> None:
        self.request_states = {"internal-1": aborted_state(), "internal-2": aborted_state()}
        self.external_req_ids = {"cmpl-left-0": ["internal-1", "internal-2"]}

    def abort_requests(self, request_ids: Any, internal: bool) -> list[str]:
        ids = list(request_ids)
        found = ids if internal else [i for each in ids for i in self.external_req_ids.pop(each)]
        return [i for i in found if self.request_states.pop(i, None)]


@pytest.mark.parametrize(
    ("given", "internal", "dropped"),
    [("internal-1", True, 1), ("cmpl-left-0", False, 2), ("unknown", True, 0)],
)
def test_a_request_that_its_client_left_is_reported(
    listening: socket.socket, reporter: Reporter, given: str, internal: bool, dropped: int
) -> None:
    watched = type("Watched", (Processor,), {"abort_requests": Processor.abort_requests})
    assert hooks.watch_aborts(watched, reporter)
    # An iterator, which can be read once.
    returned = watched().abort_requests(iter((given,)), internal)
    ended = [each for content in received(listening) for each in content.ended]
    assert len(returned) == len(ended) == dropped
    for each in ended:
        assert (each.request_id, each.finish_reason) == ("cmpl-left-0", "abort")
        assert (each.input_tokens, each.output_tokens, each.cached_tokens) == (602, 4, 16)
        assert (each.queue_s, each.prefill_s, each.decode_s) == (0.5, 1.0, 1.0)
        assert (each.e2e_s, each.ttft_s, each.preemptions) == (3.0, 1.75, 2)


def test_a_request_whose_client_left_before_its_first_token_has_no_phases(
    listening: socket.socket, reporter: Reporter
) -> None:
    none = dict.fromkeys(("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts"), 0.0)
    state = aborted_state(num_generation_tokens=0, first_token_latency=0.0, **none)
    reporter.aborted(state)
    (content,) = received(listening)
    (ended,) = content.ended
    assert ended.queue_s is ended.prefill_s is ended.decode_s is ended.ttft_s is None
    assert (ended.input_tokens, ended.cached_tokens, ended.e2e_s) == (602, None, 3.0)


def test_a_method_with_other_parameters_is_left_alone(
    listening: socket.socket, reporter: Reporter
) -> None:
    class Newer:
        def abort_requests(self, request_ids: Any, internal: bool, reason: str) -> None:
            """Take a further parameter."""

        def update_from_finished_request(self, request: Any) -> None:
            """Take one parameter."""

    before = dict(vars(Newer))
    assert not hooks.watch_aborts(Newer, reporter)
    assert not hooks.watch_first_tokens(Newer, reporter)
    assert vars(Newer) == before


def test_the_time_to_the_first_token_is_added(listening: socket.socket, reporter: Reporter) -> None:
    class Statistics:
        def __init__(self) -> None:
            self.finished_requests: list[Any] = []

        def update_from_finished_request(
            self,
            finish_reason: Any,
            request_id: Any,
            num_prompt_tokens: Any,
            max_tokens_param: Any,
            req_stats: Any,
            num_cached_tokens: int = 0,
        ) -> None:
            self.finished_requests.append(finished(request_id=request_id))

    assert hooks.watch_first_tokens(Statistics, reporter)
    stats = Statistics()
    values: dict[str, Any] = dict.fromkeys(
        ("finish_reason", "num_prompt_tokens", "max_tokens_param")
    )
    latency = SimpleNamespace(first_token_latency=0.7)
    stats.update_from_finished_request(request_id="a", req_stats=latency, **values)
    # An error of ours is not the engine's.
    stats.update_from_finished_request(request_id="b", req_stats=None, **values)
    assert [each.request_id for each in stats.finished_requests] == ["a", "b"]
    assert stats.finished_requests[0].goodput_ttft_s == 0.7


def test_errors_stay_inside_and_switch_it_off(
    listening: socket.socket, reporter: Reporter, caplog: pytest.LogCaptureFixture
) -> None:
    # No agent is no error.
    with closing(Sender(f"{listening.getsockname()}.nobody", pause_s=0.0)) as alone:
        for _ in range(3 * MAX_ERRORS):
            Reporter(alone, now=lambda: NOW).step(scheduler(), iteration(), 0)
    for _ in range(MAX_ERRORS):
        assert OFF not in caplog.text
        reporter.step(SimpleNamespace(), iteration(), 0)
    assert OFF in caplog.text
    reporter.step(scheduler(), iteration(), 0)
    reporter.hello()
    assert received(listening) == []


def test_what_waits_is_sent_though_the_engine_makes_no_step(listening: socket.socket) -> None:
    async def burst_and_silence(reporter: Reporter) -> int:
        for _ in range(100):
            reporter.step(None, iteration(finished()), 0)
        found = 0
        while found < 100:
            await asyncio.sleep(0)
            found += sum(len(content.ended) for content in received(listening))
        return found

    with closing(Sender(listening.getsockname())) as sender:
        run = burst_and_silence(Reporter(sender, now=lambda: NOW))
        assert asyncio.run(asyncio.wait_for(run, 60)) == 100


def test_what_an_agent_does_not_read_is_dropped_and_counted(
    listening: socket.socket, sender: Sender
) -> None:
    records = 3 * WAITING_DATAGRAMS * DATAGRAM_BYTES // 1024
    for number in range(records):
        sender.add(struct.pack("<I1020x", number))
        sender.send()
    headers: list[tuple[int, int]] = []
    all_sent = False
    while True:
        try:
            datagram = listening.recv(65_536)
        except BlockingIOError:
            if all_sent:
                break
            all_sent = sender.send() is None
            continue
        header = HEADER.unpack_from(datagram)
        numbers = [
            struct.unpack_from("<I", datagram, HEADER.size + 1024 * place)[0]
            for place in range(header[3])
        ]
        # The sequence number of the first record is that of the header.
        assert numbers == list(range(header[5], header[5] + header[3]))
        headers.append((header[3], header[6]))
    got = sum(count for count, _ in headers)
    assert 0 < sender.dropped == records - got
    assert headers[-1][1] == sender.dropped


def test_a_vllm_that_makes_its_application_in_another_way_is_left_alone() -> None:
    class Launcher:
        """Of another version."""

        @staticmethod
        def init_entrypoints_middleware(args: object, app: object) -> None:
            """Have other parameters."""

    with closing(Sender("/nowhere")) as sender:
        assert not hooks.add_middleware(Launcher, object, Reporter(sender))
        assert not hooks.add_middleware(object(), object, Reporter(sender))


def test_an_application_that_takes_no_middleware_starts_all_the_same() -> None:
    calls: list[tuple[object, ...]] = []

    class Launcher:
        @staticmethod
        def init_entrypoints_middleware(args: object, app: object, supported_tasks: object) -> None:
            """Note the call."""
            calls.append((args, app, supported_tasks))

    with closing(Sender("/nowhere")) as sender:
        assert hooks.add_middleware(Launcher, object, Reporter(sender))
    Launcher.init_entrypoints_middleware("args", "no application", ("generate",))
    assert calls == [("args", "no application", ("generate",))]
