"""How long the API takes to sum the causes of a million explained misses of an hour.

It reads rollups, so only these are filled for all; the rows of the others are not made.
"""

from collections.abc import Callable, Iterator

from sqlalchemy import Connection, Engine, update

from agent.catalog.causes import Cause
from agent.catalog.definitions import Verdict
from agent.records.objective import (
    CauseShare,
    ExplainedRequest,
    Explanation,
    JudgedRequest,
    Judgement,
)
from agent.records.queries import Selection, Window
from agent.store.cause_queries import CauseQueries
from agent.store.connection import for_writing, in_transaction
from agent.store.explanations import ExplanationStore
from agent.store.tables import cause_rollups
from agent.store.transactions import request_write
from benchmarks.rollup_load import DATABASES, TODAY, analyse, fewest_s, load, prepared
from tests.store.making import publish

TARGET_S = 0.5
MISSES = 1_000_000
# This many are stored one by one; then their rollups are multiplied to a million.
_STORED = 10_000
_TIMES = MISSES // _STORED
_PER_WRITE = 1000
_HOUR_S = 3600
_WINDOW = Window(from_s=TODAY, until=float(TODAY + _HOUR_S))
_CAUSES = [cause for cause in Cause if cause is not Cause.UNEXPLAINED]
_EVIDENCE = (
    "the KV cache was full for 97 % of the time with a queue (by its plugin): 64 requests ran"
)


def run() -> bool:
    """Print the times on each database; returns whether the target holds."""
    held = []
    for name, opened in DATABASES.items():
        with opened() as engine:
            prepared(engine)
            publish(engine, _fill)
            in_transaction(for_writing(engine), _grow)
            analyse(engine)
            held += [*_measured(name, engine)]
    return all(held)


def _measured(name: str, engine: Engine) -> Iterator[bool]:
    queries, selection = CauseQueries(engine), Selection()
    timed: dict[str, Callable[[], object]] = {
        "of the hour": lambda: queries.causes(_WINDOW, selection),
        "by minute": lambda: queries.causes_by_step(_WINDOW, 60, selection),
        "by model": lambda: queries.causes_by("model", _WINDOW, selection),
    }
    for what, query in timed.items():
        taken_s = fewest_s(query)
        print(
            f"causes of {MISSES:,} misses, {what}: {1000 * taken_s:.3g} ms on {name} "
            f"(target {1000 * TARGET_S:.0f} ms)"
        )
        yield taken_s <= TARGET_S


def _fill(engine: Engine) -> None:
    judged = [_missed(item) for item in load(_HOUR_S, _STORED / _HOUR_S)]
    write, keeper = request_write(engine), ExplanationStore(engine, "agent-0")
    for first in range(0, len(judged), _PER_WRITE):
        part = judged[first : first + _PER_WRITE]
        write(part)
        keeper.explain([_explained(number, item) for number, item in enumerate(part)], TODAY)


def _missed(judged: JudgedRequest) -> JudgedRequest:
    verdicts = (("chat", Verdict.MISSED),)
    return judged._replace(judgement=Judgement(Verdict.MISSED, verdicts))


def _explained(number: int, judged: JudgedRequest) -> ExplainedRequest:
    """The request with three causes over two limits."""
    first, second = (_CAUSES[(number + place) % len(_CAUSES)] for place in (0, 7))
    shares = (
        CauseShare("chat", "ttft", first, 0.75, (_EVIDENCE,)),
        CauseShare("chat", "ttft", second, 0.25, (_EVIDENCE,)),
        CauseShare("chat", "tpot", second, 0.5, (_EVIDENCE, _EVIDENCE)),
    )
    record = judged.record
    explanation = Explanation(record.trace_id, record.span_id, first, shares, ("span", "samples"))
    return ExplainedRequest(judged, explanation)


def _grow(connection: Connection) -> None:
    """Multiply the rollups to those of all misses."""
    sums = ("requests", "top_requests", "excess_s")
    connection.execute(
        update(cause_rollups).values({name: cause_rollups.c[name] * _TIMES for name in sums})
    )
