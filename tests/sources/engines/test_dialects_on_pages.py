"""One contract for every dialect on every fixture page; a new page is picked up by itself."""

import re

import pytest

from agent.catalog.engine_facts import ENGINE_FACTS
from agent.catalog.engines import DIALECTS, Dialect, Spelling
from agent.catalog.metric import Kind, Metric, Unit
from tests.sources.engines.fixture_pages import PAGES, body, translated_page

ENGINE_PAGES = sorted(
    page.stem for page in PAGES.glob("*.txt") if not page.stem.startswith("router")
)
# The frontend of the wheel of 0.33.0 was recorded in front of an engine of 0.32.0.
RECORDED = {"vllm-0.32.0", "vllm-0.32.0-dp2", "vllm-0.32.0-idle", "vllm-0.33.0-rust"}
METRICS = {metric.name: metric for metric in ENGINE_FACTS}

every_page = pytest.mark.parametrize("page", ENGINE_PAGES)


def dialect_of(page: str) -> Dialect:
    return DIALECTS[page.partition("-")[0]]


def on_page(page: str, metric: Metric, spelling: Spelling) -> bool:
    """Whether the text itself shows this spelling, judged without the code under test."""
    suffix = "_bucket" if metric.kind is Kind.HISTOGRAM else ""
    name = re.escape(spelling.series) + suffix
    if page.endswith("-ray"):
        name = name.replace("vllm:", "ray_vllm_")
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
def test_facts_have_the_catalogues_labels(page: str) -> None:
    for name, values in translated_page(page).facts:
        assert len(values) == len(METRICS[name].labels)


@every_page
def test_ratios_lie_between_0_and_1(page: str) -> None:
    ratios = [
        value
        for (name, _), value in translated_page(page).facts.items()
        if METRICS[name].unit is Unit.RATIO
    ]
    assert all(0 <= ratio <= 1 for ratio in ratios)


@every_page
def test_histograms_are_cumulative_and_end_at_infinity(page: str) -> None:
    for histogram in translated_page(page).histograms.values():
        assert histogram.bounds == tuple(sorted(set(histogram.bounds)))
        assert histogram.bounds[-1] == float("inf")
        assert histogram.counts == tuple(sorted(histogram.counts))


@every_page
def test_nothing_on_a_good_page_is_dropped(page: str) -> None:
    assert not translated_page(page).dropped


@every_page
def test_a_page_says_whether_it_was_recorded(page: str) -> None:
    composed = body(page).startswith(b"# composed from published names, not recorded\n")
    assert composed is (page not in RECORDED)


@every_page
def test_a_composed_page_says_where_its_names_are_known_from(page: str) -> None:
    said = body(page).decode().split("\n")[1]
    assert page in RECORDED or re.search(r"Known from: .*\.$", said)


@pytest.mark.parametrize("engine", DIALECTS)
def test_every_engine_has_a_page(engine: str) -> None:
    assert any(page.startswith(f"{engine}-") for page in ENGINE_PAGES)


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
