"""Verdicts: whether a request met its objectives, and by how much it exceeded their limits."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from agent.catalog.definitions import Definition, Verdict
from agent.records.objective import JudgedRequest, Judgement, Objective
from agent.records.request import FAILED, ProxyView, RequestRecord, Status

TTFT, TPOT, E2E, FAILURE = "ttft", "tpot", "e2e", "failure"


class Excess(msgspec.Struct, frozen=True):
    """One limit that a request broke. Times in seconds of the request's own time.

    `value_s` and `limit_s` are those of the whole request: for TPOT, of all tokens after the first.
    They and `seconds` are None for a request that is missed without an exceeded limit.
    """

    objective: str
    limit: str
    value_s: float | None = None
    limit_s: float | None = None

    @property
    def seconds(self) -> float | None:
        """The time above the limit."""
        if self.value_s is None or self.limit_s is None:
            return None
        return self.value_s - self.limit_s


def applied(record: RequestRecord, objective: Objective) -> tuple[RequestRecord, Objective]:
    """The request and the objective with the latencies and the limits that judge it.

    A limit that the client sent with the request replaces the objective's limit of that kind.
    """
    if (proxied := record.proxied) is not None:
        objective = _with_client_limits(objective, proxied)
        if proxied.streamed is False:
            record, objective = _not_streamed(record, objective)
        elif (proxied.choices or 1) > 1:
            objective = _of_several_choices(objective)
    return record, objective


def excesses(record: RequestRecord, objective: Objective) -> Sequence[Excess]:
    """The limits of an objective that a missed request broke.

    A failed request, and one that the definition counts as missed because a value is unknown, has
    one excess without seconds.
    """
    record, objective = applied(record, objective)
    failed = record.status in FAILED or record.status is Status.INVALID
    values = (
        (TTFT, _judged_ttft_s(record, objective.definition), objective.ttft_s, 1.0),
        (TPOT, record.tpot_s, objective.tpot_s, _timed_tokens(record)),
        (E2E, record.e2e_s, objective.e2e_s, 1.0),
    )
    broken = [
        Excess(objective.name, limit, value_s * times, limit_s * times)
        for limit, value_s, limit_s, times in values
        if value_s is not None and limit_s is not None and value_s > limit_s
    ]
    return broken if broken and not failed else [Excess(objective.name, FAILURE)]


def ratios_to_limits(record: RequestRecord, objective: Objective) -> Sequence[tuple[str, float]]:
    """Each limit by which a request is judged, with the request's latency over that limit."""
    record, objective = applied(record, objective)
    values = (
        (TTFT, _judged_ttft_s(record, objective.definition), objective.ttft_s),
        (TPOT, record.tpot_s, objective.tpot_s),
        (E2E, record.e2e_s, objective.e2e_s),
    )
    return [
        (limit, value_s / limit_s)
        for limit, value_s, limit_s in values
        if value_s is not None and limit_s is not None
    ]


def later_tokens(record: RequestRecord) -> float:
    """The tokens after the first, estimated from the times if no source counted them."""
    if record.output_tokens is not None and record.output_tokens > 1:
        return record.output_tokens - 1.0
    if not record.tpot_s:
        return 1.0
    decode_s = _after_first_s(record) if record.decode_s is None else record.decode_s
    return 1.0 if decode_s is None else max(1.0, decode_s / record.tpot_s)


def _timed_tokens(record: RequestRecord) -> float:
    """The tokens that the TPOT is the time of: those after the first event, in which several may be
    or before which reasoning may be that was not streamed. They all came before the end."""
    tokens, after_s = later_tokens(record), _after_first_s(record)
    if not record.tpot_s or after_s is None:
        return tokens
    return min(tokens, max(1.0, after_s / record.tpot_s))


def _after_first_s(record: RequestRecord) -> float | None:
    """The time from the first token to the end of the request."""
    if record.e2e_s is None or record.ttft_s is None:
        return None
    return record.e2e_s - record.ttft_s


def ttft_of(record: RequestRecord, definition: Definition) -> float | None:
    """The TTFT by a definition: with some it ends at the first event."""
    if record.ttft_s is None and definition.first_event_is_token and has_no_token(record):
        return record.proxied and record.proxied.first_byte_s
    return record.ttft_s


def waited_s(record: RequestRecord) -> float | None:
    """How long a client that left waited for its first token."""
    # A client that left before the first token waited for it as long as the request lasted.
    return record.e2e_s if record.output_tokens == 0 else record.ttft_s


def has_no_token(record: RequestRecord) -> bool:
    """Whether the response has no token: its count says so, or a stream ended without any text."""
    if record.output_tokens is None and record.proxied is not None and record.proxied.streamed:
        return record.ttft_s is None and record.finish_reason is not None
    return record.output_tokens == 0


def _judged_ttft_s(record: RequestRecord, definition: Definition) -> float | None:
    if record.status is Status.CANCELLED:
        return waited_s(record)
    return ttft_of(record, definition)


def _with_client_limits(objective: Objective, proxied: ProxyView) -> Objective:
    ttft_s, tpot_s = proxied.ttft_limit_s, proxied.tpot_limit_s
    if ttft_s is None and tpot_s is None:
        return objective
    return replace(
        objective,
        ttft_s=objective.ttft_s if ttft_s is None else ttft_s,
        tpot_s=objective.tpot_s if tpot_s is None else tpot_s,
    )


def _not_streamed(record: RequestRecord, objective: Objective) -> tuple[RequestRecord, Objective]:
    """The request with the engine's times of its tokens, and the limits that can be known of it.

    Its user gets all tokens at once. Without a limit that can be known all limits stay.
    """
    choices = record.proxied and record.proxied.choices
    # An engine's span is one choice, and each choice has times of its own.
    if record.engine_view is not None and choices == 1:
        view = record.engine_view
        record = record._replace(ttft_s=view.ttft_s, tpot_s=view.tpot_s)
    if not objective.definition.known_limits:
        return record, objective
    unknown_tpot = record.tpot_s is None and record.output_tokens != 1
    known = replace(
        objective,
        ttft_s=None if record.ttft_s is None else objective.ttft_s,
        tpot_s=None if unknown_tpot else objective.tpot_s,
    )
    any_known = (known.ttft_s, known.tpot_s, known.e2e_s) != (None, None, None)
    return record, known if any_known else objective


def _of_several_choices(objective: Objective) -> Objective:
    """The objective of a stream of several choices, of which no TPOT can be known.

    A limit on TPOT alone stays. With it beside others, only misses would be counted.
    """
    others = (objective.ttft_s, objective.e2e_s)
    if objective.definition.known_limits and others != (None, None):
        return replace(objective, tpot_s=None)
    return objective


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
    """The verdict of one limit; None if the value is unknown."""
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
    """The model and the tenant; as the client wrote them, if figures have them as unknown or
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
