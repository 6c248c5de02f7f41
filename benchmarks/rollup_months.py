"""The time of a response of the API about a month of a fleet, until now."""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Engine, insert, literal, select

from agent.analysis.tally import Tally, tally_of
from agent.catalog.time_units import DAY_S, HOUR_S
from agent.outputs.api.efficiency_routes import efficiency_and_cost
from agent.outputs.api.query_parameters import window_before
from agent.records.objective import JudgedRequest
from agent.records.queries import Dimension, Selection
from agent.store.connection import for_writing
from agent.store.minute_sums import MINUTES_KEPT_S
from agent.store.minutes import MinuteStore
from agent.store.rollups import ANY_LENGTH, KEEP_S, figures_of, grouped
from agent.store.stored_queries import stored_queries
from agent.store.tables import engine_minutes, rollup_series, rollups
from benchmarks.rollup_load import MODELS, TODAY, analyse, fewest_s, load, report
from tests.outputs.api.serving import open_api_at
from tests.records.minutes import FACTS, minute_of

QUERY_TARGET_S = 0.1
USE_TARGET_S = 5.0

ENGINES = 100
DAYS = 30
REQUESTS_PER_S = 10
SAMPLE_S = 2000
OBJECTIVES = '["chat"]'

# A window of days then begins an hour after midnight, so it reads rollups of every width.
NOW = TODAY + HOUR_S + 0.5


def months(name: str, engine: Engine) -> bool:
    """Whether `/api/v1/breakdown` responds in time."""
    _fill_rollups(engine)
    analyse(engine)
    what = f"{name}: {DAYS} days of {ENGINES} engines until now"
    with open_api_at(engine.url.render_as_string(hide_password=False)) as api:
        api.agent.now = NOW

        def seconds_by(dimension: Dimension) -> float:
            path = f"/api/v1/breakdown?by={dimension}&window={DAYS}d"
            return fewest_s(lambda: len(api.get(path).json()["groups"]))

        held = report(f"{what}, percentiles by model", seconds_by("model"), QUERY_TARGET_S, "s")
        print(f"rollups, {what}, percentiles by input length: {seconds_by('input_length'):.3g} s")
    return held


def use(name: str, engine: Engine) -> bool:
    """Whether use and cost of the same month are read in time, as `/api/v1/summary` reads them."""
    _fill_minutes(engine)
    analyse(engine)
    queries = stored_queries(engine)
    window = window_before(NOW, float(DAYS * DAY_S), HOUR_S)

    def figures() -> int:
        return len(efficiency_and_cost(queries, window, Selection()))

    what = f"{name}: {DAYS} days of {ENGINES} engines until now, use and cost"
    return report(what, fewest_s(figures, 2), USE_TARGET_S, "s")


def window_starts() -> Iterator[tuple[int, int]]:
    """The rollups of every width that a window of the month could read."""
    for width_s, from_s in (
        (DAY_S, TODAY - (DAYS + 1) * DAY_S),
        (HOUR_S, TODAY - 2 * DAY_S),
        (60, TODAY),
        (10, TODAY + HOUR_S - 600),
    ):
        for start in range(from_s, int(NOW) + 1, width_s):
            yield width_s, start // width_s * width_s
    for start in range(TODAY - (DAYS + 1) * DAY_S, TODAY - (DAYS - 1) * DAY_S, HOUR_S):
        yield HOUR_S, start


def _fill_rollups(engine: Engine) -> None:
    sample = list(load(SAMPLE_S, REQUESTS_PER_S))
    figures = {width_s: figures_by_length(sample, width_s) for width_s in (DAY_S, HOUR_S, 60, 10)}
    lengths = list(figures[DAY_S])
    with for_writing(engine).begin() as connection:
        for place in range(ENGINES):
            for number, length in enumerate(lengths, place * len(lengths) + 1):
                series = {
                    **{"id": number, "agent": f"agent-{place}", "engine": f"chat-{place}"},
                    **{"model": f"model-{place % MODELS}", "tenant": ""},
                    **{"input_length": length, "judged_by": OBJECTIVES},
                }
                connection.execute(rollup_series.insert(), series)
                rows = [
                    {"width_s": width_s, "series": number, "starts_at": start}
                    | figures[width_s][length]
                    for width_s, start in window_starts()
                    if length in figures[width_s]
                ]
                connection.execute(rollups.insert(), rows)


def figures_by_length(sample: list[JudgedRequest], width_s: int) -> dict[str, dict[str, Any]]:
    """The columns of a rollup of this width by input length, at ten requests a second."""
    at_once = [
        JudgedRequest(item.record._replace(ended_at=TODAY), item.judgement)
        for item in sample[: min(width_s, SAMPLE_S) * REQUESTS_PER_S]
    ]
    tallies = {series.input_length: tally for (_, series), tally in grouped(at_once).items()}
    if width_s >= HOUR_S:
        tallies[ANY_LENGTH] = tally_of(at_once)
    for tally in tallies.values():
        _grow(tally, max(width_s / SAMPLE_S, 1.0))
    return {length: figures_of(tally, OBJECTIVES) for length, tally in tallies.items()}


def _grow(tally: Tally, times: float) -> None:
    for bins in tally.bins.values():
        bins.update({place: round(count * times) for place, count in bins.items()})


def _fill_minutes(engine: Engine) -> None:
    """Store the minutes of one engine, and copies of them for each other engine."""
    minutes_from = TODAY + HOUR_S - int(MINUTES_KEPT_S)
    hours_from = TODAY - int(KEEP_S[HOUR_S])
    starts = [
        *range(TODAY - DAYS * DAY_S, hours_from, DAY_S),
        *range(hours_from, minutes_from, HOUR_S),
        *range(minutes_from, int(NOW) - 60, 60),
    ]
    facts = FACTS | {"engine": "chat-0"}
    minutes = [
        minute_of(facts | {"starts_at": start, "from_at": float(start), "until": start + 60.0})
        for start in starts
    ]
    MinuteStore(engine, "agent-0").write(minutes, (), NOW)
    others = [column for column in engine_minutes.columns if column.name not in ("agent", "engine")]
    with for_writing(engine).begin() as connection:
        for place in range(1, ENGINES):
            names = (literal(f"agent-{place}"), literal(f"chat-{place}"))
            of_first = select(*names, *others).where(engine_minutes.c.agent == "agent-0")
            into = ["agent", "engine", *(column.name for column in others)]
            connection.execute(insert(engine_minutes).from_select(into, of_first))
