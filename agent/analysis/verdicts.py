"""Whether a request got what was promised."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from agent.catalog.definitions import Verdict
from agent.records.objective import Judgement, Objective
from agent.records.request import ProxyView, RequestRecord, Status

_FAILED = frozenset((Status.ERROR, Status.TIMEOUT, Status.THROTTLED))

MET, MISSED, UNDETERMINED = Verdict.MET, Verdict.MISSED, Verdict.UNDETERMINED


def judge(record: RequestRecord, objective: Objective) -> Verdict:
    """The verdict on a request that the objective covers.

    A failed request is judged by the objective's definition whatever its latencies. One that its
    client left is missed only when a limit was broken before, else undetermined. A limit that the
    client asked for with the request holds in place of what the objective says of that kind, also
    where that is nothing.
    """
    if record.proxied is not None:
        objective = _as_asked(objective, record.proxied)
    if record.status in _FAILED:
        return objective.definition.failed
    if record.status is Status.CANCELLED:
        return _left(record, objective)
    limits = (
        _within(record.ttft_s, objective.ttft_s),
        _within(record.tpot_s, objective.tpot_s) or _without_tpot(record, objective),
        _within(record.e2e_s, objective.e2e_s),
    )
    if MISSED in limits:
        return MISSED
    return objective.definition.unseen if None in limits else _worst(limits)


def _as_asked(objective: Objective, proxied: ProxyView) -> Objective:
    ttft_s, tpot_s = proxied.ttft_limit_s, proxied.tpot_limit_s
    if ttft_s is None and tpot_s is None:
        return objective
    return replace(
        objective,
        ttft_s=objective.ttft_s if ttft_s is None else ttft_s,
        tpot_s=objective.tpot_s if tpot_s is None else tpot_s,
    )


def _left(record: RequestRecord, objective: Objective) -> Verdict:
    # Whoever left before the first token had waited for it as long as the request lasted.
    waited_s = record.e2e_s if record.output_tokens == 0 else record.ttft_s
    limits = (
        _within(waited_s, objective.ttft_s),
        _within(record.tpot_s, objective.tpot_s),
        _within(record.e2e_s, objective.e2e_s),
    )
    return MISSED if MISSED in limits else UNDETERMINED


def _within(value_s: float | None, limit_s: float | None) -> Verdict | None:
    """The verdict of one limit; None where the figure was not seen."""
    if limit_s is None:
        return MET
    if value_s is None:
        return None
    return MET if value_s <= limit_s else MISSED


def _without_tpot(record: RequestRecord, objective: Objective) -> Verdict | None:
    return objective.definition.single_token if record.output_tokens == 1 else None


def _worst(verdicts: Sequence[Verdict | None]) -> Verdict:
    if MISSED in verdicts:
        return MISSED
    return UNDETERMINED if UNDETERMINED in verdicts else MET


def judge_all(record: RequestRecord, objectives: Sequence[Objective]) -> Judgement:
    """The verdict of every objective that covers the request, and the worst of them as one.

    A request that no objective covers is undetermined: nothing was promised to it.
    """
    return _together(_verdicts(record, objectives))


def _verdicts(
    record: RequestRecord, objectives: Sequence[Objective]
) -> tuple[tuple[str, Verdict], ...]:
    return tuple(
        [
            (objective.name, judge(record, objective))
            for objective in objectives
            if objective.match.everything
            or objective.match.covers(
                record.model, record.tenant, record.route, record.input_tokens
            )
        ]
    )


def _together(by_objective: tuple[tuple[str, Verdict], ...]) -> Judgement:
    if not by_objective:
        return Judgement(UNDETERMINED, ())
    return Judgement(_worst([verdict for _, verdict in by_objective]), by_objective)


Judge = Callable[[RequestRecord], Judgement]


def judge_for(objectives: Sequence[Objective]) -> Judge:
    """A function that judges by these objectives; equal judgements are one shared object."""
    shared: dict[tuple[tuple[str, Verdict], ...], Judgement] = {}

    def judged(record: RequestRecord) -> Judgement:
        by_objective = _verdicts(record, objectives)
        judgement = shared.get(by_objective)
        if judgement is None:
            judgement = shared[by_objective] = _together(by_objective)
        return judgement

    return judged
