"""Verdicts: whether a request met its objectives."""

from collections.abc import Sequence

from agent.analysis.applied_limits import (
    applied,
    has_no_token,
    ttft_of,
    waited_s,
)
from agent.catalog.definitions import Definition, Verdict
from agent.records.objective import JudgedRequest, Judgement, Objective
from agent.records.request import FAILED, RequestRecord, Status

MET, MISSED, UNDETERMINED = Verdict.MET, Verdict.MISSED, Verdict.UNDETERMINED


def judge(record: RequestRecord, objective: Objective) -> Verdict:
    """The verdict on a request that the objective covers.

    The objective's definition judges a failed or invalid request, whatever its latencies. Unless it
    judges cancelled requests, too, these are missed only when they broke a limit before, else
    undetermined. A limit that the client sent with the request replaces the objective's limit of
    that kind.
    """
    record, objective = applied(record, objective)
    if record.status in FAILED or record.status is Status.INVALID:
        return objective.definition.failed
    if record.status is Status.CANCELLED:
        return objective.definition.cancelled or _cancelled(record, objective)
    if objective.definition.empty_fails and has_no_token(record):
        return objective.definition.failed
    unseen = objective.definition.unseen
    limits = (
        _within(ttft_of(record, objective.definition), objective.ttft_s) or unseen,
        _within(record.tpot_s, objective.tpot_s) or _without_tpot(record, objective.definition),
        _within(record.e2e_s, objective.e2e_s) or unseen,
    )
    strongest = objective.definition.strongest
    return strongest if strongest in limits else _worst(limits)


def _cancelled(record: RequestRecord, objective: Objective) -> Verdict:
    limits = (
        _within(waited_s(record), objective.ttft_s),
        _within(record.tpot_s, objective.tpot_s),
        _within(record.e2e_s, objective.e2e_s),
    )
    return MISSED if MISSED in limits else UNDETERMINED


def _within(value_s: float | None, limit_s: float | None) -> Verdict | None:
    """The verdict of one limit; None where the value is unknown."""
    if limit_s is None:
        return MET
    if value_s is None:
        return None
    return MET if value_s <= limit_s else MISSED


def _without_tpot(record: RequestRecord, definition: Definition) -> Verdict:
    if record.output_tokens == 1:
        return definition.single_token
    return definition.no_token if has_no_token(record) else definition.unseen


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    if MISSED in verdicts:
        return MISSED
    return UNDETERMINED if UNDETERMINED in verdicts else MET


def _verdicts(
    record: RequestRecord, objectives: Sequence[Objective]
) -> tuple[tuple[str, Verdict], ...]:
    if record.status is Status.INVALID:
        objectives = [objective for objective in objectives if objective.judges_invalid]
    return tuple(
        [
            (objective.name, judge(record, objective))
            for objective in objectives
            if objective.match.everything
            or objective.match.covers(*_asked_for(record), record.route, record.input_tokens)
        ]
    )


def _asked_for(record: RequestRecord) -> tuple[str | None, str | None]:
    """The model and the tenant; as the client wrote them, where figures have them as unknown or
    together with others: an objective covers these requests too."""
    model, tenant, view = record.model, record.tenant, record.proxied
    if view is None:
        return model, tenant
    return model or view.requested_model, view.requested_tenant or tenant


class Judge:
    """Judges requests by these objectives; nothing else gives a request its verdicts.

    The pipeline judges every record, the store every joined one, and the proxy's tracing asks
    whether a request missed its objectives. Safe to use from several threads.
    """

    def __init__(self, objectives: Sequence[Objective]) -> None:
        self._objectives = tuple(objectives)
        # Equal judgements are one object, so that requests can be grouped by it.
        self._shared: dict[tuple[tuple[str, Verdict], ...], Judgement] = {}

    def judged(self, record: RequestRecord) -> JudgedRequest:
        """The request with its judgement."""
        return JudgedRequest(record, self.judgement(record))

    def missed(self, record: RequestRecord) -> bool:
        """Whether the request missed any of its objectives."""
        return self.judgement(record).verdict is MISSED

    def judgement(self, record: RequestRecord) -> Judgement:
        """The verdict of every objective that covers the request, and the worst of them as one.

        A request without an objective is undetermined.
        """
        by_objective = _verdicts(record, self._objectives)
        judgement = self._shared.get(by_objective)
        if judgement is None:
            verdicts = [verdict for _, verdict in by_objective] or [UNDETERMINED]
            judgement = self._shared.setdefault(
                by_objective, Judgement(_worst(verdicts), by_objective)
            )
        return judgement
