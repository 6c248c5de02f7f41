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
