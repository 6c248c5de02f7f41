"""Makes missed requests and their explanations, and reads what a database sums of them."""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Engine, select

from agent.catalog.causes import Cause
from agent.catalog.definitions import Verdict
from agent.records.objective import CauseShare, ExplainedRequest, Explanation, JudgedRequest
from agent.store.explanations import ExplanationStore
from agent.store.tables import cause_rollups, requests, rollup_series
from tests.store.making import NOON, judgement, request

MISSED = judgement(Verdict.MISSED)

# The sums of a place: requests, those with this first cause, and excess seconds.
Sums = list[Any]
Places = dict[tuple[Any, ...], Sums]


def missed(number: int, **given: Any) -> JudgedRequest:
    """The request of this number, which missed the objective `chat`."""
    return request(number, MISSED, **given)


def share(
    cause: Cause, excess_s: float | None, limit: str = "ttft", objective: str = "chat"
) -> CauseShare:
    """A share with one sentence of evidence."""
    return CauseShare(objective, limit, cause, excess_s, (f"{cause} took {excess_s} s",))


def explained(judged: JudgedRequest, *shares: CauseShare, top: Cause | None = None) -> Any:
    """The request with an explanation of these shares; the first names the first cause."""
    record = judged.record
    first = shares[0].cause if top is None else top
    return ExplainedRequest(
        judged, Explanation(record.trace_id, record.span_id, first, shares, ("span", "samples"))
    )


def explain(engine: Engine, *items: ExplainedRequest, at: float = NOON + 60) -> list[Any]:
    """Store these explanations as agent-0; returns those that were the first of their request."""
    return ExplanationStore(engine, "agent-0").explain(items, at)


def summed_causes(engine: Engine) -> Places:
    """What the rollups of causes hold, by width, start, series, objective, limit and cause."""
    query = select(cause_rollups, rollup_series).join(
        rollup_series, rollup_series.c.id == cause_rollups.c.series
    )
    query = query.where(cause_rollups.c.requests > 0)
    with engine.connect() as connection:
        return {
            _place(row, row["width_s"], row["starts_at"], row["tenant"]): [
                row["requests"],
                row["top_requests"],
                None if row["excess_s"] is None else round(row["excess_s"], 6),
            ]
            for row in connection.execute(query).mappings()
        }


def _place(row: Mapping[Any, Any], *first: Any) -> tuple[Any, ...]:
    return (*first, *(row[name] for name in ("objective", "limit_name", "cause")))


def causes_of_rows(engine: Engine) -> Places:
    """The expected sums, counted row by row."""
    sums: Places = {}
    with engine.connect() as connection:
        found = connection.execute(select(requests).where(requests.c.explanation.is_not(None)))
        for row in found.mappings():
            for width_s in (10, 60, 3600, 86400):
                start = int(row["ended_at"] // width_s) * width_s
                for each in _counted(row["cause"], json.loads(row["explanation"])["shares"]):
                    *place, top, excess_s = each
                    into = sums.setdefault(
                        (width_s, start, row["tenant"] or "", *place), [0, 0, None]
                    )
                    into[0] += 1
                    into[1] += top
                    if excess_s is not None:
                        into[2] = round((into[2] or 0.0) + excess_s, 6)
    return sums


def _counted(top: str, shares: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Objective, limit, cause, whether it is the first one, and seconds of each share."""
    by_objective: dict[str, list[dict[str, Any]]] = {}
    for each in shares:
        by_objective.setdefault(each["objective"], []).append(each)
    with_top = {
        name: each
        for name, each in by_objective.items()
        if any(one["cause"] == top for one in each)
    }
    worst = max(with_top.values(), key=lambda of: sum(one["excess_s"] or 0.0 for one in of))
    counted = _marked("", top, worst)
    for name, of_objective in by_objective.items():
        causes = [one["cause"] for one in of_objective]
        seconds = [
            sum(one["excess_s"] or 0.0 for one in of_objective if one["cause"] == cause)
            for cause in causes
        ]
        counted += _marked(name, causes[seconds.index(max(seconds))], of_objective)
    return counted


def _marked(objective: str, top: str, shares: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    of_top = [each for each in shares if each["cause"] == top]
    main = max(of_top, key=lambda each: each["excess_s"] or 0.0)
    return [
        (objective, each["limit"], each["cause"], each is main, each["excess_s"]) for each in shares
    ]
