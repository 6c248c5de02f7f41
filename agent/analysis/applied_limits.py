"""The limits that apply to one request, and by how much the request exceeded them."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from agent.catalog.definitions import Definition
from agent.records.objective import Objective
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


def later_tokens(record: RequestRecord) -> float:
    """The tokens after the first, estimated from the times where no source counted them."""
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
