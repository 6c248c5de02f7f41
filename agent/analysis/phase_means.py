"""Where the time of requests goes: mean phases of those around the median, and of the slowest."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, fsum

# Around the median: the middle fifth by end-to-end time.
_MIDDLE = (0.4, 0.6)
_SLOWEST = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPhases:
    """The phases of one request in seconds; they add up to its end-to-end time.

    `network_s` is what the user waited beyond the engine; None if no user's view is known.
    """

    ended_at: float
    e2e_s: float
    network_s: float | None
    front_s: float
    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMeans:
    """Mean seconds of each phase over these requests."""

    requests: int
    e2e_s: float
    network_s: float | None
    front_s: float
    queue_s: float
    prefill_s: float
    decode_s: float


def request_phases(
    *,
    ended_at: float,
    e2e_s: float | None,
    engine_e2e_s: float | None,
    queue_s: float | None,
    prefill_s: float | None,
    decode_s: float | None,
) -> RequestPhases | None:
    """The phases of a request; None if the engine told not all of them.

    `engine_e2e_s` is the engine's time if `e2e_s` is the user's.
    """
    inside_s = e2e_s if engine_e2e_s is None else engine_e2e_s
    if e2e_s is None or inside_s is None or queue_s is None:
        return None
    if prefill_s is None or decode_s is None:
        return None
    return RequestPhases(
        ended_at=ended_at,
        e2e_s=e2e_s,
        # Clocks of two views may differ by a little.
        network_s=None if engine_e2e_s is None else max(e2e_s - inside_s, 0.0),
        front_s=max(inside_s - queue_s - prefill_s - decode_s, 0.0),
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
    )


def median_and_slowest(
    requests: Sequence[RequestPhases],
) -> tuple[PhaseMeans | None, PhaseMeans | None]:
    """Means of the middle fifth by end-to-end time, and of the slowest 5 %; None without any."""
    if not requests:
        return None, None
    ordered = sorted(requests, key=lambda each: each.e2e_s)
    count = len(ordered)
    first, last = (int(share * count) for share in _MIDDLE)
    middle = ordered[first : max(last, first + 1)]
    return _means(middle), _means(ordered[-ceil(_SLOWEST * count) :])


def _means(requests: Sequence[RequestPhases]) -> PhaseMeans:
    return PhaseMeans(
        requests=len(requests),
        e2e_s=_mean([each.e2e_s for each in requests]),
        network_s=_mean_of_known([each.network_s for each in requests]),
        front_s=_mean([each.front_s for each in requests]),
        queue_s=_mean([each.queue_s for each in requests]),
        prefill_s=_mean([each.prefill_s for each in requests]),
        decode_s=_mean([each.decode_s for each in requests]),
    )


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _mean(known) if known else None
