"""The exposition as scrapers read it."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as read_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as read_text

from agent.catalog import engine_facts as facts
from agent.catalog.efficiency_metrics import EFFICIENCY_METRICS
from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.metric import Kind, Metric
from agent.outputs.prometheus.agent_exposition import AgentExposition
from agent.outputs.prometheus.meter import Meter
from agent.records.engine import EngineSample
from tests.outputs.prometheus.filled import (
    COUNTERS,
    COUNTS,
    FULL_SAMPLE,
    GAUGES,
    INFO,
    OBJECTIVES,
    OPENMETRICS,
    SAMPLE,
    TEXT,
    count,
    exposition_of,
    filled_meter,
)
from tests.published_metrics import METRICS
from tests.records.making import record

Read = Callable[[str], Iterable[Any]]
READERS: dict[str, Read] = {TEXT: read_text, OPENMETRICS: read_openmetrics}

each_format = pytest.mark.parametrize("accept", READERS, ids=["text", "openmetrics"])


def samples(meter: Meter, name: str, accept: str = TEXT) -> list[tuple[dict[str, str], float]]:
    """Return the labels and the value of each sample with this name."""
    return [
        (sample.labels, sample.value)
        for family in READERS[accept](exposition_of(meter, accept))
        for sample in family.samples
        if sample.name == name
    ]


@pytest.mark.parametrize(
    ("metric", "labels", "value"), [*GAUGES, *COUNTERS], ids=lambda each: getattr(each, "name", "")
)
def test_a_value_is_published_under_its_name_and_labels(
    metric: Metric, labels: tuple[str, ...], value: float
) -> None:
    ending = "_total" if metric.kind is Kind.COUNTER else ""
    named = dict(zip(metric.labels, labels, strict=True))
    assert (named, value) in samples(filled_meter(), f"{metric.name}{ending}")


def test_both_formats_have_the_same_values() -> None:
    def values(accept: str) -> set[tuple[str, tuple[tuple[str, str], ...], float]]:
        return {
            (sample.name, tuple(sorted(sample.labels.items())), sample.value)
            for family in READERS[accept](exposition_of(filled_meter(), accept))
            for sample in family.samples
        }

    assert values(OPENMETRICS) == values(TEXT)


@each_format
def test_the_parser_of_prometheus_reads_the_exposition(accept: str) -> None:
    families = {
        family.name: family for family in READERS[accept](exposition_of(filled_meter(), accept))
    }
    declared = {metric.name: metric for metric in METRICS}
    assert families.keys() <= declared.keys()
    for name, family in families.items():
        assert family.type == declared[name].kind
        assert family.documentation == declared[name].help
    # The fixed state leaves out most engine facts, GPUs and whole minutes.
    missing = declared.keys() - families.keys()
    omitted = (*facts.ENGINE_FACTS, *GPU_FACTS, *EFFICIENCY_METRICS)
    assert missing <= {fact.name for fact in omitted}


@each_format
def test_a_series_has_exactly_the_declared_labels(accept: str) -> None:
    engine_facts = {fact.name for fact in facts.ENGINE_FACTS}
    declared = {
        metric.name: {*metric.labels, *(("engine", "model") if metric.name in engine_facts else ())}
        for metric in METRICS
    }
    for family in READERS[accept](exposition_of(filled_meter(), accept)):
        seen = set()
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == declared[family.name]
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in seen
            seen.add(key)


def test_openmetrics_has_trace_ids_and_text_has_none() -> None:
    shown = {
        sample.exemplar.labels["trace_id"]
        for family in READERS[OPENMETRICS](exposition_of(filled_meter(), OPENMETRICS))
        for sample in family.samples
        if sample.exemplar
    }
    assert shown == {f"{number:032x}" for number in (1, 2, 3, 4, 5)}
    text = exposition_of(filled_meter())
    assert "trace_id" not in text
    assert " # " not in text.replace("# HELP", "").replace("# TYPE", "")


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        ("text/html,application/xhtml+xml;q=0.9", "text/plain; version=0.0.4"),
        ("text/plain;version=0.0.4", "text/plain; version=0.0.4"),
        ("application/openmetrics-text", "application/openmetrics-text; version=1.0.0"),
        (
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2",
            "application/openmetrics-text; version=1.0.0",
        ),
        ("application/vnd.google.protobuf", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;version=x", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;version=;;,=;q=", "application/openmetrics-text; "),
        ("text/plain;version=9999999999", "text/plain; "),
        (";;;,,,===", "text/plain; version=0.0.4"),
    ],
)
def test_a_scraper_gets_an_accepted_format_or_plain_text(accept: str, content_type: str) -> None:
    body, actual = AgentExposition(filled_meter(), INFO).render(accept)
    assert actual.startswith(content_type)
    assert body


@pytest.mark.parametrize("escaping", ["underscores", "allow-utf-8", "dots", "values"])
@each_format
def test_names_are_escaped_as_the_library_escapes_them(accept: str, escaping: str) -> None:
    exposition = AgentExposition(filled_meter(), INFO)
    accepted = f"{accept.split(';')[0]};version=1.0.0;escaping={escaping}"
    encode, content_type = choose_encoder(accepted)
    assert exposition.render(accepted) == (encode(exposition), content_type)


@each_format
def test_hostile_names_are_published_unchanged(accept: str) -> None:
    names = ['quo"te', "back\\slash", "new\nline", "\\n", "größe", "{}", 'a",b="c', "<b>", " "]
    meter = Meter(OBJECTIVES, [])
    count(meter, *[record(number, model=name) for number, name in enumerate(names)])
    published = samples(meter, "llm_input_tokens_total", accept)
    assert {labels["model"]: value for labels, value in published} == dict.fromkeys(names, 100.0)


def test_objectives_are_published_with_their_targets_and_limits() -> None:
    meter = Meter(OBJECTIVES, [])
    targets = {labels["objective"]: of for labels, of in samples(meter, "llm_slo_target_ratio")}
    assert targets == {"chat": 0.95, "long": 0.9}
    limits = {
        (labels["objective"], labels["measure"]): limit_s
        for labels, limit_s in samples(meter, "llm_slo_limit_seconds")
    }
    assert limits == {
        ("chat", "ttft"): 0.2,
        ("chat", "tpot"): 0.12,
        ("long", "ttft"): 0.77,
        ("long", "e2e"): 33.0,
    }


def test_the_agent_publishes_its_name_version_and_simulation() -> None:
    exposition = AgentExposition(Meter((), []), ("agent-7", "9.9", "true")).render(TEXT)[0].decode()
    assert 'llm_agent_info{agent="agent-7",simulated="true",version="9.9"} 1.0' in exposition


# Engines


def engine_facts_of(meter: Meter) -> set[tuple[str, str]]:
    """Return each published fact with its engine."""
    names = {fact.name for fact in facts.ENGINE_FACTS}
    return {
        (family.name, sample.labels["engine"])
        for family in read_text(exposition_of(meter))
        for sample in family.samples
        if family.name in names
    }


def up(meter: Meter) -> dict[str, float]:
    return {labels["engine"]: value for labels, value in samples(meter, "llm_engine_up")}


def test_every_engine_fact_is_published_with_its_own_name_and_labels() -> None:
    meter = Meter((), ["chat-0"])
    meter.sample(FULL_SAMPLE)
    assert engine_facts_of(meter) == {(fact.name, "chat-0") for fact in facts.ENGINE_FACTS}
    for number, fact in enumerate(COUNTS, 1):
        shown = f"{fact.name}_total" if fact.kind is Kind.COUNTER else fact.name
        labels = {"engine": "chat-0", "model": "llama", **dict.fromkeys(fact.labels, "x")}
        assert samples(meter, shown) == [(labels, float(number))]


def test_an_engine_is_down_until_it_is_scraped() -> None:
    meter = Meter((), ["chat-0"])
    assert up(meter) == {"chat-0": 0}
    assert engine_facts_of(meter) == set()
    meter.sample(SAMPLE)
    assert up(meter) == {"chat-0": 1}


def test_facts_of_an_engine_that_cannot_be_scraped_are_not_published() -> None:
    meter = Meter((), ["chat-0", "chat-1"])
    meter.sample(SAMPLE)
    meter.sample(EngineSample(**{**fields(SAMPLE), "engine": "chat-1"}))
    meter.scrape_failed("chat-0", "timeout")
    assert up(meter) == {"chat-0": 0, "chat-1": 1}
    assert {engine for _, engine in engine_facts_of(meter)} == {"chat-1"}
    outcomes = {
        (labels["engine"], labels["outcome"]): value
        for labels, value in samples(meter, "llm_agent_scrapes_total")
        if value
    }
    assert outcomes == {("chat-0", "ok"): 1, ("chat-0", "timeout"): 1, ("chat-1", "ok"): 1}
    meter.sample(SAMPLE)
    assert up(meter) == {"chat-0": 1, "chat-1": 1}


def test_an_engine_without_a_model_name_has_the_model_unknown() -> None:
    meter = Meter((), ["chat-0"])
    meter.sample(EngineSample(**{**fields(SAMPLE), "model": None}))
    ((labels, _),) = samples(meter, "llm_engine_requests_running")
    assert labels == {"engine": "chat-0", "model": "unknown"}


def test_an_unknown_fact_is_absent_and_not_zero() -> None:
    meter = Meter((), ["chat-0"])
    meter.sample(EngineSample(**{**fields(SAMPLE), "facts": {}, "histograms": {}}))
    assert engine_facts_of(meter) == set()
    assert up(meter) == {"chat-0": 1}


def fields(sample: EngineSample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in EngineSample.__slots__}
