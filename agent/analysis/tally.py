"""Counts, sums and latency bins of a group of requests, and how groups add up."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.analysis.quantiles import bins_of
from agent.records.objective import JudgedRequest, Judgement
from agent.records.request import BY_CLIENT, FAILED, Status, Vantage

MEASURES = ("ttft_s", "tpot_s", "e2e_s", "queue_s")

# The key of the verdict of all objectives together; no objective can have this name.
ALL_OBJECTIVES = ""


@dataclass(slots=True)
class VerdictCounts:
    """Requests with one verdict, and the sum of their known output tokens."""

    requests: int = 0
    output_tokens: int = 0

    def add(self, other: "VerdictCounts") -> None:
        """Add the counts of others."""
        self.requests += other.requests
        self.output_tokens += other.output_tokens


@dataclass(slots=True)
class Tally:
    """Counts, sums and latency bins of requests; `..._known` counts those with a known value.

    `verdicts` maps (objective or ALL_OBJECTIVES, verdict) to counts, `bins` a measure to its bins.
    Of the requests seen at the proxy, `proxy_counted` counts those with a known share in the next
    two: `proxy_ended` leaves out what the client cancelled or spoilt, `proxy_failed` failed.
    """

    requests: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    seen_at_proxy: int = 0
    input_tokens: int = 0
    input_tokens_known: int = 0
    output_tokens: int = 0
    output_tokens_known: int = 0
    proxy_counted: int = 0
    proxy_ended: int = 0
    proxy_failed: int = 0
    verdicts: dict[tuple[str, str], VerdictCounts] = field(default_factory=dict)
    bins: dict[str, dict[int, int]] = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        """Add another group. The order of adding never matters."""
        self.requests += other.requests
        self.seen_at_proxy += other.seen_at_proxy
        self.input_tokens += other.input_tokens
        self.input_tokens_known += other.input_tokens_known
        self.output_tokens += other.output_tokens
        self.output_tokens_known += other.output_tokens_known
        self.proxy_counted += other.proxy_counted
        self.proxy_ended += other.proxy_ended
        self.proxy_failed += other.proxy_failed
        _add_counts(self.statuses, other.statuses)
        for key, counts in other.verdicts.items():
            self.verdicts.setdefault(key, VerdictCounts()).add(counts)
        for measure, bins in other.bins.items():
            _add_counts(self.bins.setdefault(measure, {}), bins)


def tally_of(judged: Sequence[JudgedRequest]) -> Tally:
    """The tally of these requests, made column by column: several times faster than by row."""
    records = [item.record for item in judged]
    at_proxy = [r.status for r in records if r.vantage is not Vantage.ENGINE]
    input_tokens = [r.input_tokens for r in records if r.input_tokens is not None]
    output_tokens = [r.output_tokens for r in records if r.output_tokens is not None]
    # A refusal takes no time, and would hide how long real responses take.
    timed = [r for r in records if r.status is not Status.INVALID]
    latencies_s = {
        "ttft_s": [r.ttft_s for r in timed if r.ttft_s is not None],
        "tpot_s": [r.tpot_s for r in timed if r.tpot_s is not None],
        "e2e_s": [r.e2e_s for r in timed if r.e2e_s is not None],
        "queue_s": [r.queue_s for r in timed if r.queue_s is not None],
    }
    return Tally(
        requests=len(records),
        statuses={str(key): n for key, n in Counter([r.status for r in records]).items()},
        seen_at_proxy=len(at_proxy),
        input_tokens=sum(input_tokens),
        input_tokens_known=len(input_tokens),
        output_tokens=sum(output_tokens),
        output_tokens_known=len(output_tokens),
        proxy_counted=len(at_proxy),
        proxy_ended=sum([status not in BY_CLIENT for status in at_proxy]),
        proxy_failed=sum([status in FAILED for status in at_proxy]),
        verdicts=_verdict_counts(judged),
        bins={name: bins_of(values_s) for name, values_s in latencies_s.items() if values_s},
    )


def _verdict_counts(judged: Iterable[JudgedRequest]) -> dict[tuple[str, str], VerdictCounts]:
    output_tokens: dict[Judgement, list[int]] = {}
    for item in judged:
        output_tokens.setdefault(item.judgement, []).append(item.record.output_tokens or 0)
    counts: dict[tuple[str, str], VerdictCounts] = {}
    for judgement, tokens in output_tokens.items():
        group = VerdictCounts(len(tokens), sum(tokens))
        for name, verdict in ((ALL_OBJECTIVES, judgement.verdict), *judgement.by_objective):
            counts.setdefault((name, str(verdict)), VerdictCounts()).add(group)
    return counts


def _add_counts(into: dict[Any, int], counts: Mapping[Any, int]) -> None:
    for key, count in counts.items():
        into[key] = into.get(key, 0) + count
