"""Opens what `compare` is given: a window, a database, or a result file of a load generator."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum, auto
from functools import partial
from pathlib import Path

from sqlalchemy import Engine, make_url

from agent.analysis.comparison.measures import (
    ATTAINMENT,
    DEATH_KINDS,
    GOODPUT,
    OOM_KINDS,
    OUTPUT_RATE,
    REQUEST_RATE,
    percentile_name,
)
from agent.analysis.comparison.run_columns import (
    FiguresSource,
    ObjectiveBounds,
    RunColumns,
    RunFigures,
    run_of,
)
from agent.analysis.engine_figures import AttainmentBounds, LatencyBounds, figures_of_rows
from agent.analysis.histogram_bounds import Bounds
from agent.analysis.summary import QUANTILES
from agent.errors import AgentError, SettingsInvalid
from agent.records.objective import Objective, objectives_by_agent
from agent.records.queries import Dimension, Selection, Window
from agent.settings.named_files import in_time
from agent.settings.values import did_you_mean, duration_s, masked, shown
from agent.sources.result_files import BenchedRun, read_result_file
from agent.store.clickhouse.connecting import CLICKHOUSE
from agent.store.connection import open_engine
from agent.store.engine_counts import EngineCountQueries
from agent.store.migrating import require_newest
from agent.store.run_rows import RunEmpty, read_events, read_run, whole_window
from agent.store.sqlite_place import sqlite_path
from agent.store.store_queries import StoreQueries, agents_of

Run = RunColumns | RunFigures

# The name of a latency in a comparison, by that of the engine's histogram.
_LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}

# How a load generator writes single requests, by its name.
_HINTS = {
    "vllm bench serve": "vllm bench serve writes them with --save-detailed",
    "SGLang bench_serving": "bench_serving writes them with --output-details",
    "AIPerf": "profile_export.jsonl has them",
}

_NAMED: tuple[Dimension, ...] = ("engine", "model", "tenant")

_SQLITE_HEADER = b"SQLite format 3\0"
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_DURATION = re.compile(r"[0-9.]+[smhdw]")


class RunUnknown(AgentError):
    """What was given for a run is not a window, a database or a result file."""

    def __init__(self, given: str, why: str) -> None:
        super().__init__(
            f"{shown(given)} is not a run: {why}. Give a window (2026-11-20, 2026-11-20T10:00/1h, "
            "24h/1h, 1h), a database (sqlite:///a.db, a.db or postgresql://..., alone or with "
            "#WINDOW) or a result file of vllm bench serve, AIPerf or GuideLLM"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What is read of each run. `objective` and `target` judge requests of result files."""

    url: Callable[[], str]
    now: datetime
    chosen: Selection
    objective: Objective | None
    target: float | None = None


def open_run(given: str, options: RunOptions) -> Run:
    """The run that is meant. Raises AgentError."""
    source, _, part = given.partition("#")
    path = Path(source)
    if "://" in source:
        return _of_database(given, source, part, options)
    if not given:
        raise RunUnknown(given, "it is empty")
    try:
        kind = in_time(path, partial(_kind, path))
    except OSError as error:
        raise RunUnknown(given, str(error.strerror or error)) from error
    if kind is _PathKind.RESULTS:
        return _of_file(given, path, part, options)
    if kind is _PathKind.SQLITE:
        return _of_database(given, f"sqlite:///{path}", part, options)
    return _of_database(given, options.url(), given, options)


class _PathKind(Enum):
    NOTHING = auto()
    RESULTS = auto()
    SQLITE = auto()


def _kind(path: Path) -> _PathKind:
    """Raises OSError for a pipe or a device."""
    if not path.exists():
        return _PathKind.NOTHING
    if path.is_dir():
        return _PathKind.RESULTS
    if not path.is_file():
        raise OSError("it is a pipe or a device; write it to a regular file")
    with path.open("rb") as file:
        header = file.read(len(_SQLITE_HEADER))
    return _PathKind.SQLITE if header == _SQLITE_HEADER else _PathKind.RESULTS


def _of_database(given: str, url: str, window: str, options: RunOptions) -> Run:
    over = window_of(window, options.now) if window else None
    if options.objective is not None:
        raise SettingsInvalid(
            [
                "--ttft-ms, --tpot-ms, --e2e-ms and --target judge result files; a database has "
                "verdicts and objectives"
            ]
        )
    engine = open_engine(url)
    if engine.dialect.name == CLICKHOUSE:
        raise RunUnknown(given, "compare reads no ClickHouse; compare figures of its API")
    file = sqlite_path(make_url(url))
    # SQLite would make an empty database.
    if file is not None and not file.exists():
        raise RunUnknown(given, f"there is no file {file}")
    try:
        require_newest(engine)
        simulated = " (SIMULATED)" if any(each["simulated"] for each in agents_of(engine)) else ""
        name = f"{masked(given)}{simulated}"
        return _run_in(engine, name, over, options)
    finally:
        engine.dispose()


def _run_in(engine: Engine, name: str, over: Window | None, options: RunOptions) -> Run:
    """The requests of a window; if none has a row, what engines counted in it."""
    try:
        window = over or whole_window(engine)
        return read_run(engine, name, window, options.chosen, _targets(engine, options.chosen))
    except RunEmpty as error:
        everything = Window(from_s=0, until=options.now.timestamp())
        found = _counted_run(engine, name, over or everything, options.chosen)
        found = found or _run_of_deaths(engine, name, over, options.chosen)
        if found is None:
            close = _close_names(engine, everything, options.chosen)
            raise RunEmpty(f"{error}{close}") from error
        return found


def _targets(engine: Engine, chosen: Selection) -> dict[str, float]:
    """The targets of the objectives in force, by name; a preset has none.

    If agents differ, the highest one.
    """
    found: dict[str, float] = {}
    for _, each in objectives_by_agent(StoreQueries(engine).objectives_in_force()):
        if not each.is_preset and chosen.objective in (None, each.name):
            found[each.name] = max(each.target, found.get(each.name, 0.0))
    return found


def _close_names(engine: Engine, over: Window, chosen: Selection) -> str:
    """The names of a database that an unknown one is like, as the end of an error."""
    queries = StoreQueries(engine)
    found = []
    for dimension in _NAMED:
        given: str | None = getattr(chosen, dimension)
        if given is not None:
            known = {name for name in queries.tallies_by(dimension, over, Selection()) if name}
            found += [] if given in known else [did_you_mean(given, sorted(known))]
    return "".join(found)


def _counted_run(engine: Engine, name: str, over: Window, chosen: Selection) -> RunFigures | None:
    """None if no engine counted anything, and for one tenant or objective."""
    if chosen.tenant is not None or chosen.objective is not None:
        return None
    # Whole minutes inside, so that two windows side by side share none.
    inside = Window(from_s=-(-over.from_s // 60) * 60, until=over.until // 60 * 60)
    if inside.from_s >= inside.until:
        return None
    rows = EngineCountQueries(engine).engine_counts(inside, chosen)
    objectives = objectives_by_agent(StoreQueries(engine).objectives_in_force())
    found = figures_of_rows(rows, objectives)
    if found is None or not found.requests:
        return None
    (attained,) = found.attainment if len(found.attainment) == 1 else (None,)
    shares = {} if attained is None else {ATTAINMENT: Bounds(attained.lower, attained.upper, None)}
    rates = {REQUEST_RATE.name: found.throughput_rps, OUTPUT_RATE: found.output_tokens_per_s}
    goodput = {} if found.goodput_rps is None else {GOODPUT: found.goodput_rps}
    return RunFigures(
        name=name,
        requests=round(found.requests),
        length_s=found.covered_s,
        figures={name: value for name, value in rates.items() if value is not None},
        bounds=_percentiles(found.latencies) | shares | goodput,
        source=FiguresSource.ENGINE,
        events=read_events(engine, inside, chosen),
        objectives=_bounded(found.attainment, _targets(engine, chosen)),
        began_at=inside.from_s,
    )


def _run_of_deaths(
    engine: Engine, name: str, over: Window | None, chosen: Selection
) -> RunFigures | None:
    """A window without requests in which an engine died or ran out of memory; else None."""
    if over is None:
        return None
    events = read_events(engine, over, chosen)
    if not any(len(events.get(kind, ())) for kind in (*OOM_KINDS, *DEATH_KINDS)):
        return None
    return RunFigures(
        name=name,
        requests=0,
        length_s=over.until - over.from_s,
        figures={},
        source=FiguresSource.NOBODY,
        events=events,
        began_at=over.from_s,
    )


def _percentiles(latencies: Mapping[str, LatencyBounds]) -> dict[str, Bounds]:
    """In seconds, by the names of measures."""
    return {
        percentile_name(measure, QUANTILES[quantile]): bounds.times(0.001)
        for latency, measure in _LATENCIES.items()
        if latency in latencies
        for quantile, bounds in latencies[latency].quantiles_ms.items()
    }


def _bounded(
    attainment: Sequence[AttainmentBounds], targets: Mapping[str, float]
) -> dict[str, ObjectiveBounds]:
    return {
        each.objective: ObjectiveBounds(
            targets[each.objective], Bounds(each.lower, each.upper, None)
        )
        for each in attainment
        if each.objective in targets
    }


def _of_file(given: str, path: Path, number: str, options: RunOptions) -> Run:
    if number and not number.isdecimal():
        raise RunUnknown(given, f"{number!r} is not the number of a benchmark in a file")
    if options.chosen != Selection():
        raise SettingsInvalid(
            ["--engine, --model, --tenant and --objective select requests of a database"]
        )
    found = read_result_file(path, int(number) if number else None)
    name = f"{given} ({found.tool})"
    if isinstance(found, BenchedRun):
        return run_of(name, found.records, options.objective, found.load, options.target)
    return RunFigures(
        name=name,
        requests=found.requests,
        length_s=found.length_s,
        figures=found.figures,
        configured_load=found.load,
        hint=_HINTS.get(found.tool),
    )


def window_of(given: str, now: datetime) -> Window:
    """A window as text: a day, FROM/UNTIL, FROM/LENGTH, AGO/LENGTH, or the last LENGTH.

    Times without a zone are in UTC. Raises RunUnknown.
    """
    first, slash, second = given.partition("/")
    try:
        begin = _time(first, now)
        if slash:
            end = _after(begin, second)
        else:
            end = begin + timedelta(days=1) if _DAY.fullmatch(first) else now
    except (ValueError, OverflowError) as error:
        raise RunUnknown(given, str(error)) from error
    if end <= begin or not (slash or _DAY.fullmatch(first) or _DURATION.fullmatch(first)):
        raise RunUnknown(given, "it has no end after its begin")
    return Window(from_s=int(begin.timestamp()), until=end.timestamp())


def _after(begin: datetime, given: str) -> datetime:
    if _DURATION.fullmatch(given):
        return begin + timedelta(seconds=duration_s(given))
    return _time(given, begin)


def _time(given: str, now: datetime) -> datetime:
    if _DURATION.fullmatch(given):
        return now - timedelta(seconds=duration_s(given))
    found = datetime.fromisoformat(given)
    return found if found.tzinfo else found.replace(tzinfo=UTC)
