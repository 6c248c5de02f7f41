"""The part of the `check` command that reads the engines: what their expositions give."""

from collections.abc import Iterable, Iterator

from agent.catalog.engines import DIALECTS
from agent.settings import EngineSettings
from agent.sources.engines.engine_source import EngineSource, ScrapeResult
from agent.sources.engines.fetch import open_session
from agent.sources.engines.name_drift import expected_facts


def read_once(engines: Iterable[EngineSettings], now: float) -> Iterator[tuple[bool, str]]:
    """(readable, message) of each engine; the message names what its exposition holds or lacks."""
    for engine in engines:
        with open_session() as session:
            source = EngineSource(
                name=engine.name, url=engine.url, kind=engine.kind, session=session
            )
            result = source.read(now)
        yield result.sample is not None, f"engine {engine.name}: {_described(result)}"


def _described(result: ScrapeResult) -> str:
    sample = result.sample
    if sample is None:
        return f"cannot be read: {result.failure}"
    given = {name for name, _ in sample.facts} | sample.histograms.keys()
    absent = sorted(expected_facts(DIALECTS[sample.dialect]) - given)
    said = f"{sample.dialect}, model {sample.model or 'unknown'}, {len(given)} facts"
    if not absent:
        return f"{said}, none is absent"
    return (
        f"{said}; absent: {', '.join(absent)} (some engines give a fact from its first use on, and "
        "older releases do not give all)"
    )
