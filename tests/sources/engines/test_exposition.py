"""Expositions that are read, by every dialect, and facts that go with an upgrade."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from agent.catalog import engine_facts as fact
from agent.catalog.engine_facts import ENGINE_FACTS
from agent.catalog.engines import DIALECTS, Dialect, Spelling
from agent.catalog.metric import Kind, Metric, Unit
from agent.errors import ExpositionUnreadable
from agent.records.engine import EngineSample, HistogramSnapshot
from agent.sources.engines.exposition import MAX_LABEL_CHARACTERS, Exposition, read_exposition
from agent.sources.engines.translate import (
    AUTO,
    NameDrift,
    dialects_of,
    expected_facts,
    translate,
    wanted_series,
)
from tests.sources.engines.fixture_pages import PAGES, body, translated_page
from tests.sources.engines.fixture_pages import body as body_of


def numbers(page: Exposition, name: str) -> list[tuple[Mapping[str, str], float]]:
    return [(dict(sample.labels), sample.value) for sample in page.series.get(name, ())]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b"<!doctype html><html></html>\n", "html"),
        (b"\n  <html>\n", "html"),
        (b'{"detail":"Not Found"}\n', "json"),
        (b"[]\n", "json"),
        (b'a 1\nb{x="', "cut_off"),
        (b"a 1\nb 2", "cut_off"),
        (b"a 1\n\xff\xfe\n", "not_text"),
    ],
)
def test_what_is_no_whole_metrics_page_is_refused_by_name(body: bytes, reason: str) -> None:
    with pytest.raises(ExpositionUnreadable) as caught:
        read_exposition(body, {"a", "b"})
    assert caught.value.reason == reason


# Lines that are no part of a series, or broken; the good ones beside them are read.
BROKEN = ("a", "a ", "a x", "a 1_000", 'a{x="1} 1', "a{x=1} 1", 'a{x="1",x="2"} 1', "a 1 2 3")


@pytest.mark.parametrize(
    ("lines", "values", "dropped"),
    [
        ("# TYPE a gauge\na 1\na_created 1.7e9\nab 3\nother x", {"": 1}, {}),
        # Timestamps, exemplars, spaces and carriage returns.
        ('a{x="1"} 1 1700000000000\r', {"1": 1}, {}),
        ('a{x="2"}\t2 # {trace_id="t"} 0.5 1.7', {"2": 2}, {}),
        ('a{x="3",} 3e0  ', {"3": 3}, {}),
        ('a{x="4"} 4 1700000000.123 # {trace_id="t"} 0.5\na {x="5"} 5', {"4": 4, "5": 5}, {}),
        *((f"a {value}", {}, {"value_not_finite": 1}) for value in ("NaN", "+Inf", "-Inf", "inf")),
        *((line, {}, {"line_malformed": 1} if line != "a" else {}) for line in BROKEN),
        ('a{x="1"} 1\na{x="1"} 2', {"1": 2}, {"series_repeated": 1}),
    ],
)
def test_lines_give_the_values_that_were_asked_for(
    lines: str, values: dict[str, float], dropped: dict[str, int]
) -> None:
    page = read_exposition(f"{lines}\nb 2\n# EOF".encode(), {"a", "b"})
    found = {labels.get("x", ""): value for labels, value in numbers(page, "a")}
    assert (found, page.dropped) == (values, dropped)
    assert numbers(page, "b") == [({}, 2.0)]
    assert page.series.keys() <= {"a", "b"}


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=20),
        st.floats(allow_nan=False, allow_infinity=False),
        max_size=5,
    )
)
def test_whatever_a_client_library_writes_is_read_back(values: dict[str, float]) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("asked_for", "Help with a \\ and a\nline.", ["label"], registry=registry)
    for label, value in values.items():
        gauge.labels(label).set(value)
    page = read_exposition(generate_latest(registry), {"asked_for"})
    assert {labels["label"]: value for labels, value in numbers(page, "asked_for")} == values
    assert all(math.isfinite(value) for _, value in numbers(page, "asked_for"))
    assert not page.dropped


def test_a_long_label_is_cut_and_stays_apart_from_others_like_it() -> None:
    names = ["m" * 100_000, "m" * 100_001, "m" * MAX_LABEL_CHARACTERS]
    page = "".join(f'n{{model_name="{name}"}} 1\n' for name in names).encode()
    read = [each.labels["model_name"] for each in read_exposition(page, {"n"}).series["n"]]
    assert len(set(read)) == 3
    assert {len(label) for label in read} == {MAX_LABEL_CHARACTERS}
    assert read[2] == names[2]


# Whatever an engine serves in place of its exposition

NAMES = ("vllm-0.32.0-dp2", "sglang-0.4.0", "tgi-3.3.7", "trtllm-1.1.0")
AUTO_DIALECTS = dialects_of(AUTO)
WANTED = wanted_series(AUTO_DIALECTS)

# The same examples each time: a test that fails must fail again.
fuzz = settings(max_examples=20, deadline=None, derandomize=True, database=None)

# What the format itself is made of is likelier to lead somewhere than any other bytes.
PIECES = st.sampled_from(
    [*(bytes([byte]) for byte in b'{}"\\,= \n#\0'), b"le", b"+Inf", b"NaN", b"1e999"]
) | st.binary(max_size=3)
# Python's own idea of a line has more ends than the format has.
GARBAGE = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n")), max_size=5)


@cache
def whole(name: str) -> Exposition:
    return read_exposition(body_of(name), WANTED)


@pytest.mark.parametrize("name", NAMES)
@fuzz
@given(spoils=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40), PIECES), max_size=8))
def test_a_spoiled_page_gives_finite_values_or_a_reason(
    name: str, spoils: list[tuple[float, int, bytes]]
) -> None:
    body = bytearray(body_of(name))
    for place, gone, put in spoils:
        at = int(place * len(body))
        body[at : at + gone] = put
    try:
        found = read_exposition(bytes(body), WANTED)
        translated = translate(found, AUTO_DIALECTS)
    except ExpositionUnreadable:
        return
    assert found.series.keys() <= WANTED
    assert all(math.isfinite(each.value) for of in found.series.values() for each in of)
    assert all(math.isfinite(value) for value in translated.facts.values())


@pytest.mark.parametrize("name", NAMES)
@fuzz
@given(lines=GARBAGE, data=st.data())
def test_lines_of_no_known_series_change_no_value(
    name: str, lines: list[str], data: st.DataObject
) -> None:
    parts = body_of(name).split(b"\n")
    for line in lines:
        # Before the first line it may make a page of another kind, behind the last a cut one.
        parts.insert(data.draw(st.integers(1, len(parts) - 1)), b"x" + line.encode())
    assert read_exposition(b"\n".join(parts), WANTED) == whole(name)


@fuzz
@given(body=st.binary(max_size=300))
def test_any_bytes_give_values_or_a_reason(body: bytes) -> None:
    try:
        found = read_exposition(body, {"a", "b"})
    except ExpositionUnreadable:
        return
    assert found.series.keys() <= {"a", "b"}


# One contract for every dialect on every page; a new page is picked up by itself

ENGINE_PAGES = sorted(
    page.stem for page in PAGES.glob("*.txt") if not page.stem.startswith("router")
)
METRICS = {metric.name: metric for metric in ENGINE_FACTS}

every_page = pytest.mark.parametrize("page", ENGINE_PAGES)


def dialect_of(page: str) -> Dialect:
    return DIALECTS[page.partition("-")[0]]


def on_page(page: str, metric: Metric, spelling: Spelling) -> bool:
    """Whether the text itself shows this spelling, judged without the code under test."""
    suffix = "_bucket" if metric.kind is Kind.HISTOGRAM else ""
    name = re.escape(spelling.series) + suffix
    if page.endswith("-ray"):
        name = re.sub("^(vllm|sglang):", r"ray_\1_", name)
    lines = re.findall(rf"^{name}([{{ ].*)$", body(page).decode(), re.MULTILINE)
    return any(shows(line, spelling) for line in lines)


def shows(line: str, spelling: Spelling) -> bool:
    if 'server="' in line and 'engine="' not in line:
        return False
    if spelling.zero_means_off and not float(line.rpartition(" ")[2]):
        return False
    words = "|".join(spelling.words)
    if spelling.number_in and not re.search(rf'{spelling.number_in}="({words or "[0-9]"})', line):
        return False
    return all(
        any(f'{label}="{value}"' in line for value in values)
        for label, values in spelling.only.items()
    )


@every_page
def test_the_engine_is_recognised_by_its_series(page: str) -> None:
    assert translated_page(page).dialect is dialect_of(page)


@every_page
def test_every_fact_on_the_page_is_translated_and_no_other(page: str) -> None:
    shown = {
        metric.name
        for metric, spellings in dialect_of(page).facts.items()
        if any(on_page(page, metric, spelling) for spelling in spellings)
    }
    told = {name for name, _ in translated_page(page).facts} | set(translated_page(page).histograms)
    assert told - {"llm_engine_data_parallel_ranks"} == shown


@every_page
def test_facts_fit_the_catalogue_and_nothing_is_dropped(page: str) -> None:
    found = translated_page(page)
    for (name, labels), value in found.facts.items():
        assert len(labels) == len(METRICS[name].labels)
        assert METRICS[name].unit is not Unit.RATIO or 0 <= value <= 1
    for histogram in found.histograms.values():
        assert histogram.bounds == tuple(sorted(set(histogram.bounds)))
        assert histogram.bounds[-1] == float("inf")
        assert histogram.counts == tuple(sorted(histogram.counts))
    assert not found.dropped


@pytest.mark.parametrize("engine", DIALECTS)
def test_every_spelling_stands_on_some_page(engine: str) -> None:
    pages = [page for page in ENGINE_PAGES if page.startswith(f"{engine}-")]
    missing = [
        spelling.series
        for metric, spellings in DIALECTS[engine].facts.items()
        for spelling in spellings
        if spelling.series != "process_start_time_seconds"
        and not any(on_page(page, metric, spelling) for page in pages)
    ]
    assert not missing


# Names that drift

SGLANG = DIALECTS["sglang"]
DURATIONS = {fact.REQUEST_DURATION.name: HistogramSnapshot((1.0, float("inf")), (1, 2), 3.0)}
USAGE, OUTPUT = fact.KV_CACHE_USAGE.name, fact.OUTPUT_TOKENS.name


def sample(
    facts: Mapping[str, float] | None = None,
    *,
    finished: float | None = None,
    durations: bool = False,
) -> EngineSample:
    known: dict[tuple[str, tuple[str, ...]], float] = {
        (name, ()): value for name, value in (facts or {}).items()
    }
    if finished is not None:
        known[fact.REQUESTS_FINISHED.name, ("stop",)] = finished
    return EngineSample(
        engine="chat",
        at=1.0,
        dialect="sglang",
        model="m",
        facts=known,
        histograms=DURATIONS if durations else {},
        process_started_at=None,
    )


WORKED = sample({USAGE: 0.5}, finished=3)


@pytest.mark.parametrize(
    ("steps", "gone"),
    [
        # A restarted engine without requests has not lost what it creates at first use, nor has
        # one whose first request has begun.
        ([sample({USAGE: 0.5}, finished=3, durations=True), sample({USAGE: 0.0})], set()),
        (
            [
                sample({USAGE: 0.5}, finished=3, durations=True),
                sample({USAGE: 0.1, OUTPUT: 9.0, fact.REQUESTS_RUNNING.name: 1.0}),
            ],
            set(),
        ),
        # Whatever is left shows that requests have finished.
        ([WORKED, sample(finished=1.0)], {USAGE}),
        ([WORKED, sample(durations=True)], {USAGE}),
        ([WORKED, sample({OUTPUT: 9.0, fact.REQUESTS_RUNNING.name: 0.0})], {USAGE}),
        # It stays gone over a restart until it is back.
        ([WORKED, sample(finished=4), sample()], {USAGE}),
        ([WORKED, sample(finished=4), sample(), sample({USAGE: 0.0})], set()),
        # Facts that depend on settings and requests are not expected.
        ([sample({fact.REQUESTS_ABORTED.name: 1.0}, finished=3), sample(finished=4)], set()),
    ],
)
def test_facts_that_a_working_engine_no_longer_gives_are_gone(
    steps: list[EngineSample], gone: set[str]
) -> None:
    drift = NameDrift("chat")
    *before, last = steps
    for each in before:
        drift.gone(each, SGLANG)
    assert drift.gone(last, SGLANG) & {USAGE, fact.REQUESTS_ABORTED.name} == gone


def test_what_an_earlier_run_of_the_agent_saw_is_missed_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worked = sample(finished=3)
    # The settings may have given the limit.
    earlier = {USAGE: 0.5, fact.MAX_CONTEXT_TOKENS.name: 4096.0}
    drift = NameDrift("chat", sample(earlier, finished=3))
    assert drift.gone(worked, SGLANG) == {USAGE}
    assert len(caplog.records) == 1
    marked = replace(worked, facts={**worked.facts, (fact.FACT_MISSING.name, (USAGE,)): 1.0})
    for now in (worked, sample({})):
        assert NameDrift("chat", marked).gone(now, SGLANG) == {USAGE}
    assert len(caplog.records) == 1
    # Another kind of engine at this address.
    assert NameDrift("chat", marked).gone(worked, DIALECTS["vllm"]) == set()


@pytest.mark.parametrize(
    "page",
    [
        *("vllm-0.32.0", "vllm-0.32.0-dp2", "vllm-0.32.0-idle"),
        # Of several processes, and of engines without a start time.
        *("vllm-0.33.0-dp4", "sglang-0.5.23", "sglang-0.5.23-dp2", "tgi-3.3.7", "trtllm-1.3.0"),
    ],
)
def test_a_whole_exposition_has_every_fact_that_is_expected(page: str) -> None:
    found = translated_page(page)
    given = {name for name, _ in found.facts} | found.histograms.keys()
    assert expected_facts(found.dialect) <= given
