"""The API route of alerts: when the pages on error budgets fired."""

from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from fastapi import APIRouter
from pydantic import Field

from agent.analysis.burn_rates import BurnPlan, plan
from agent.analysis.firing import Firing, firings, minute_verdicts, pages_look_back_s
from agent.catalog.time_units import MINUTE_S
from agent.outputs.api.api_context import ApiContext, ApiQueries
from agent.outputs.api.base_responses import BaseResponse
from agent.outputs.api.figure_routes import Chosen, LastHour
from agent.records.queries import Selection, Window


class AlertResponse(BaseResponse):
    """A page on the error budget of an objective that fired for a model."""

    alert: str = Field(description="the name of the rule in Prometheus, and of its runbook")
    rule: str = Field(description="outage, fast burn or slow burn")
    objective: str
    model: str | None
    fired_from: datetime | None = Field(description="null if before the window")
    fired_until: datetime | None = Field(description="null if it fired at the end of the window")


class AlertsResponse(BaseResponse):
    """The pages that fired in a window, the first one first."""

    known_from: datetime = Field(
        description="the begin of the window, or later if minutes before are no longer kept"
    )
    items: list[AlertResponse]


class _Shown(NamedTuple):
    """A window, from when on its pages are known, and the minutes that decide about them."""

    known_from_s: float
    minutes: Window


def alert_routes(context: ApiContext) -> APIRouter:
    """The route of alerts."""
    router = APIRouter(tags=["figures"])

    @router.get("/alerts")
    def alerts(chosen: Chosen, asked: LastHour) -> AlertsResponse:
        """When the rules that `goodput-agent render` writes would have paged for an objective.

        Their windows and thresholds are applied to the minutes of all requests of each model,
        whether or not Prometheus has these rules. Mutes of Alertmanager are unknown. Of an engine,
        tenant or agent, the alerts on models of its requests are shown.
        """
        now = context.now()
        begin, end = asked.bounds(now, context.longest_window_s)
        return context.read(lambda queries: _alerts(queries, now, (begin, end), chosen))

    return router


def _alerts(
    queries: ApiQueries, now: float, bounds: tuple[float, float], chosen: Selection
) -> AlertsResponse:
    plans = _plans(queries, chosen)
    shown = _shown(bounds, now - queries.kept_s(MINUTE_S), pages_look_back_s(list(plans.values())))
    items = list(_items(queries, shown, plans, _models(queries, shown, chosen)))
    items.sort(key=lambda each: each.fired_from or datetime.min.replace(tzinfo=UTC))
    return AlertsResponse(known_from=_utc(shown.known_from_s), items=items)


def _plans(queries: ApiQueries, chosen: Selection) -> Mapping[str, BurnPlan]:
    """The rules by objective. Agents with the same objective have one rule."""
    return {
        row["name"]: plan(row["definition"]["target"], row["definition"]["window_s"])
        for row in queries.objectives_in_force()
        if chosen.objective in (None, row["name"])
    }


def _shown(bounds: tuple[float, float], kept_from: float, look_back_s: float) -> _Shown:
    begin, end = bounds
    first = int(max(begin - look_back_s, kept_from) // MINUTE_S) * MINUTE_S
    # A minute that is not over could end an alert too early.
    until = max(int(end // MINUTE_S) * MINUTE_S, first)
    return _Shown(max(begin, first + look_back_s), Window(from_s=first, until=until))


def _models(queries: ApiQueries, shown: _Shown, chosen: Selection) -> Collection[str | None] | None:
    """The models of the chosen requests; None is all."""
    if chosen.model is not None:
        return [chosen.model]
    if (chosen.engine, chosen.tenant, chosen.agent) == (None, None, None):
        return None
    return queries.tallies_by("model", shown.minutes, chosen)


def _items(
    queries: ApiQueries,
    shown: _Shown,
    plans: Mapping[str, BurnPlan],
    models: Collection[str | None] | None,
) -> Iterator[AlertResponse]:
    over = shown.minutes
    if not plans or shown.known_from_s >= over.until:
        return
    for (objective, model), counted in queries.verdicts_by_minute(over).items():
        if objective not in plans or (models is not None and model not in models):
            continue
        verdicts = minute_verdicts(over.from_s, over.until, counted)
        for each in firings(plans[objective], verdicts, shown.known_from_s):
            yield _response(each, objective, model)


def _response(firing: Firing, objective: str, model: str | None) -> AlertResponse:
    return AlertResponse(
        alert=firing.alert,
        rule=firing.rule,
        objective=objective,
        model=model,
        fired_from=None if firing.from_s is None else _utc(firing.from_s),
        fired_until=None if firing.until_s is None else _utc(firing.until_s),
    )


def _utc(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)
