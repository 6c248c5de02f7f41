"""The verdicts, how load generators judge edge cases, and thresholds that several parts share.

Sources, as of 2026: vLLM `vllm/benchmarks/serve.py` (0.32), AIPerf 0.13 `good_request_fraction`,
GuideLLM 0.8.1, inference-perf (Aug 2026)."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Whether one request met an objective."""

    MET = "met"
    MISSED = "missed"
    UNDETERMINED = "undetermined"

    # Every request looks verdicts up in dictionaries, and Enum's own hash is a slow call.
    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """Verdicts for edge cases; attainment leaves undetermined requests out.

    `failed`: the request ended in an error, a time-out or a rejection. `cancelled`: the client
    left; with None the request is missed if it broke a limit before, else undetermined.
    `single_token`, `no_token`: a limit on TPOT, and a response of one output token or of none.
    `unseen`: a limit on a value that is unknown. `strongest`: the verdict of a request that broke
    one limit if another is undetermined. `first_event_is_token`: TTFT ends at the first event
    of a stream without a token. `empty_fails`: a response without a token is a failed request.
    `counts_invalid`: a response of 4xx to the client's own mistake is a failure like any other.
    `known_limits`: a response that was not streamed, or that has several choices, is judged by the
    limits that can be known.
    """

    name: str
    failed: Verdict
    cancelled: Verdict | None
    single_token: Verdict
    no_token: Verdict
    unseen: Verdict
    counts_invalid: bool = True
    known_limits: bool = False
    strongest: Verdict = Verdict.MISSED
    first_event_is_token: bool = False
    empty_fails: bool = False


GOODPUT = Definition(
    name="goodput",
    failed=Verdict.MISSED,
    cancelled=None,
    single_token=Verdict.MET,
    no_token=Verdict.UNDETERMINED,
    unseen=Verdict.UNDETERMINED,
    counts_invalid=False,
    known_limits=True,
)

DEFINITIONS = {
    definition.name: definition
    for definition in (
        GOODPUT,
        Definition(
            name="vllm",
            failed=Verdict.UNDETERMINED,
            cancelled=Verdict.UNDETERMINED,
            single_token=Verdict.MET,
            no_token=Verdict.MET,
            unseen=Verdict.UNDETERMINED,
            first_event_is_token=True,
        ),
        Definition(
            name="aiperf",
            failed=Verdict.MISSED,
            cancelled=Verdict.MISSED,
            single_token=Verdict.MISSED,
            no_token=Verdict.MISSED,
            unseen=Verdict.MISSED,
            empty_fails=True,
        ),
        Definition(
            name="guidellm",
            failed=Verdict.MISSED,
            cancelled=Verdict.UNDETERMINED,
            single_token=Verdict.UNDETERMINED,
            no_token=Verdict.UNDETERMINED,
            unseen=Verdict.UNDETERMINED,
            strongest=Verdict.UNDETERMINED,
        ),
        Definition(
            name="inference-perf",
            failed=Verdict.UNDETERMINED,
            cancelled=Verdict.UNDETERMINED,
            single_token=Verdict.MISSED,
            no_token=Verdict.MISSED,
            unseen=Verdict.MISSED,
        ),
    )
}

# Waiting requests. A queue that stays longer needs another replica.
DEEP_QUEUE = 10
# A pool of prefill or decode engines is too small if more requests than this wait in each of its
# engines, while fewer than the second number wait in each of the other pool.
SHORT_POOL_QUEUE, ROOM_POOL_QUEUE = 2.0, 1.0
# Share of the KV cache. A full cache is normal under load; requests that wait for it are not.
FULL_CACHE = 0.95
# The busiest data-parallel rank over the mean of all. Above, half more than its part.
UNEVEN_RANKS = 1.5
