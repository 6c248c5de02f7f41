"""The past of a simulated engine: its frames, its death and its return."""

from base64 import b64decode

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from agent.demo import ENGINES, LIMITS, PAST_S, scenario_file
from agent.simulator.past_engine import FRAME_S, Frame, PastEngine, frame_of
from agent.simulator.scenario import load_scenario
from tests.simulator.kit import steps

# The second engine of the demo is dead from 810 s to 855 s of each round of 1440 s.
BEFORE_S, DIES_S, RETURNS_S, AFTER_S = 5060.0, 5130.0, 5175.0, 5215.0


def unix_ns(at_s: float) -> int:
    return round((1_000_000 + at_s) * 1e9)


def frames(from_s: float, until_s: float, place: int = 1) -> list[Frame]:
    engine = past_engine(place)
    engine.start(from_s)
    return list(engine.frames(until_s))


def past_engine(place: int) -> PastEngine:
    return PastEngine(load_scenario(scenario_file(ENGINES[place])), ENGINES[place], unix_ns)


def value(frame: Frame, name: str) -> float:
    families = text_string_to_metric_families(frame.exposition or "")
    samples = [sample for family in families for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == name)


@pytest.mark.parametrize("place", range(len(ENGINES)))
def test_the_limits_of_the_demo_are_those_of_its_scenarios(place: int) -> None:
    scenario = load_scenario(scenario_file(ENGINES[place]))
    told = {
        "running_requests": scenario.max_num_seqs,
        "step_tokens": scenario.max_num_batched_tokens,
    }
    assert told == LIMITS


def test_an_engine_dies_loses_its_requests_and_starts_anew() -> None:
    past = frames(BEFORE_S, AFTER_S)
    dead = [frame for frame in past if frame.exposition is None]
    assert {frame.at - 1_000_000 for frame in dead} <= {
        frame.at - 1_000_000
        for frame in past
        if DIES_S < frame.at - 1_000_000 < RETURNS_S + FRAME_S
    }
    assert len(dead) >= (RETURNS_S - DIES_S) // FRAME_S - 1
    # Requests that were open ended without a token, and no other came.
    assert [each.ended_s for each in dead[0].proxied if each.first_s is None]
    assert [frame.proxied for frame in dead[1:]] == [()] * (len(dead) - 1)
    first, last = past[0], past[-1]
    assert value(first, "process_start_time_seconds") == 1_000_000 + BEFORE_S
    assert value(last, "process_start_time_seconds") == 1_000_000 + RETURNS_S


def test_a_frame_has_the_span_of_each_request_that_its_proxy_saw_end() -> None:
    past = frames(0.0, 60.0, place=0)
    ids: set[tuple[str, str]] = set()
    for frame in past:
        export = ExportTraceServiceRequest.FromString(b64decode(frame.spans or ""))
        ids |= {
            (span.trace_id.hex(), span.parent_span_id.hex())
            for resource in export.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }
    proxied = [each for frame in past for each in frame.proxied]
    assert len(proxied) > 5
    assert ids == {(each.trace_id, each.span_id) for each in proxied}
    counted = value(past[-1], "vllm:request_success_total")
    assert counted == len(proxied)
    assert sum(each.output_tokens for each in proxied) <= value(
        past[-1], "vllm:generation_tokens_total"
    )


def test_a_slow_client_has_its_response_when_it_reads_again() -> None:
    past = frames(960.0, 1080.0)
    slow = [each for frame in past for each in frame.proxied if each.ended_s > 14]
    assert len(slow) > 10
    assert {each.output_tokens for each in slow} == {250}
    assert all(each.ended_at <= frame.at for frame in past for each in frame.proxied)


def test_the_gpu_works_no_more_than_it_can() -> None:
    for frame in frames(0.0, 300.0, place=0):
        assert 0 < frame.gpu["dram"] < 1
        assert 0 < frame.gpu["tensor"] < 1
        assert frame.gpu["watts"] < frame.gpu["limit_watts"]


def test_no_request_is_cut_where_the_past_ends() -> None:
    engine = past_engine(0)
    assert all(each.first_s is not None for frame in engine.frames(60.0) for each in frame.proxied)
    open_requests = engine.batch.load.running
    assert open_requests > 0
    assert [each for each in engine.end().proxied if each.first_s is None] == []
    # They go on, and no other comes: clients send them from now on.
    ended = [done for step in steps(engine.batch) for done in step.finished]
    assert len(ended) == open_requests


def test_a_throttled_gpu_has_a_low_clock_and_the_time_of_it() -> None:
    # From 600 s to 675 s.
    before, *_, during = frames(580.0, 640.0)
    assert during.gpu["clock_hertz"] == pytest.approx(during.gpu["clock_max_hertz"] / 3)
    assert before.gpu["clock_hertz"] == before.gpu["clock_max_hertz"]
    assert during.gpu["throttled_s"] == pytest.approx(40.0)
    # The whole time of these frames was throttled, and not one moment before or after.
    (until_it,) = frames(585.0, 600.0)
    assert until_it.gpu["clock_hertz"] == until_it.gpu["clock_max_hertz"]
    *_, last, after = frames(600.0, 690.0)
    assert last.gpu["clock_hertz"] == pytest.approx(last.gpu["clock_max_hertz"] / 3)
    assert after.gpu["clock_hertz"] == after.gpu["clock_max_hertz"]


def test_a_frame_has_the_steps_and_the_ended_requests_of_the_plugin() -> None:
    past = frames(0.0, 60.0)
    ended = {each[0] for frame in past for each in frame.ended}
    assert ended == {f"chatcmpl-{each.request_id}" for frame in past for each in frame.proxied}
    # Of equal steps the last, with their number: their tokens are those of the exposition.
    reported = sum(times * figures[3] for frame in past for times, *figures in frame.steps)
    assert reported == value(past[-1], "vllm:generation_tokens_total")


def test_a_frame_survives_its_way_as_json() -> None:
    (frame, *_) = frames(PAST_S - FRAME_S, PAST_S)
    assert frame_of(frame.plain()).plain() == frame.plain()
