"""The phases of an engine's start, from the spans that it sends while it loads."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from agent.catalog.start_phases import BOOT, FRONT, PHASE_OF_SPAN
from agent.records.engine import LoadingSpan


def phases_s(
    spans: Iterable[LoadingSpan], began_at: float | None, ready_at: float
) -> Mapping[str, float]:
    """The seconds of each phase, empty without spans. They add up to the whole start.

    Spans overlap: a worker's are inside those of its core. Each moment belongs to the span that
    began last. What lies before the first span or after the last one is a phase of its own.
    Without `began_at` the start begins with the first span.
    """
    known = [_within(span, began_at, ready_at) for span in spans if span.name in PHASE_OF_SPAN]
    known = [span for span in known if span.ended_at > span.began_at]
    if not known:
        return {}
    phases: defaultdict[str, float] = defaultdict(float)
    first, last = min(s.began_at for s in known), max(s.ended_at for s in known)
    moments = sorted({moment for span in known for moment in (span.began_at, span.ended_at)})
    for begin, end in pairwise(moments):
        phases[_phase(known, begin, end)] += end - begin
    phases[BOOT] = first - (first if began_at is None else began_at)
    phases[FRONT] += ready_at - last
    return {phase: seconds for phase, seconds in phases.items() if seconds > 0}


def _within(span: LoadingSpan, began_at: float | None, ready_at: float) -> LoadingSpan:
    began = span.began_at if began_at is None else max(span.began_at, began_at)
    return span._replace(began_at=began, ended_at=min(span.ended_at, ready_at))


def _phase(spans: Sequence[LoadingSpan], begin: float, end: float) -> str:
    active = [span for span in spans if span.began_at <= begin and span.ended_at >= end]
    if not active:
        return FRONT
    return PHASE_OF_SPAN[max(active, key=lambda span: span.began_at).name]
