"""The past of a simulated engine: its frames, its death and its return."""

from base64 import b64decode

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from agent.demo import ENGINES, LIMITS, PAST_S, SCENARIOS
from agent.simulator.past_engine import FRAME_S, Frame, PastEngine, frame_of
from agent.simulator.scenario import load_scenario

# The second engine of the demo is dead from 6000 s to 6240 s.
BEFORE_S, DIES_S, RETURNS_S, AFTER_S = 5900.0, 6000.0, 6240.0, 6330.0


def unix_ns(at_s: float) -> int:
    return round((1_000_000 + at_s) * 1e9)


def frames(from_s: float, until_s: float, place: int = 1) -> list[Frame]:
    scenario = load_scenario(SCENARIOS / f"demo-{place}.yaml")
    engine = PastEngine(scenario, ENGINES[place], unix_ns)
    engine.start(from_s)
    return list(engine.frames(until_s))


def value(frame: Frame, name: str) -> float:
    families = text_string_to_metric_families(frame.exposition or "")
    samples = [sample for family in families for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == name)


@pytest.mark.parametrize("place", range(len(ENGINES)))
def test_the_limits_of_the_demo_are_those_of_its_scenarios(place: int) -> None:
    scenario = load_scenario(SCENARIOS / f"demo-{place}.yaml")
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


def test_the_gpu_works_no_more_than_it_can() -> None:
    for frame in frames(0.0, 300.0, place=0):
        assert 0 < frame.gpu["dram"] < 1
        assert 0 < frame.gpu["tensor"] < 1
        assert frame.gpu["watts"] < frame.gpu["limit_watts"]


def test_a_frame_survives_its_way_as_json() -> None:
    (frame, *_) = frames(PAST_S - FRAME_S, PAST_S)
    assert frame_of(frame.plain()).plain() == frame.plain()
