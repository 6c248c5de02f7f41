"""The verdicts, and how load generators judge what is neither plainly good nor plainly bad.

Sources, as of 2026: vLLM `vllm/benchmarks/serve.py` (0.32), AIPerf 0.13 `good_request_fraction`,
GuideLLM 0.8.1, inference-perf (Aug 2026).
"""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Whether one request got what was promised."""

    MET = "met"
    MISSED = "missed"
    UNDETERMINED = "undetermined"

    # Verdicts are keys on the way of every request, and Enum's own hash is a call into Python.
    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """How edge cases are judged; undetermined requests leave the population.

    `failed` is the verdict on a request that ended in an error, a time-out or a refusal;
    `single_token` that of a TPOT limit on a request of one output token; `unseen` that of a limit
    whose figure was not seen.
    """

    name: str
    failed: Verdict
    single_token: Verdict
    unseen: Verdict


GOODPUT = Definition(
    name="goodput",
    failed=Verdict.MISSED,
    single_token=Verdict.MET,
    unseen=Verdict.UNDETERMINED,
)

DEFINITIONS = {
    definition.name: definition
    for definition in (
        GOODPUT,
        Definition(
            name="vllm",
            failed=Verdict.UNDETERMINED,
            single_token=Verdict.MET,
            unseen=Verdict.UNDETERMINED,
        ),
        Definition(
            name="aiperf",
            failed=Verdict.MISSED,
            single_token=Verdict.MISSED,
            unseen=Verdict.MISSED,
        ),
        Definition(
            name="guidellm",
            failed=Verdict.MISSED,
            single_token=Verdict.UNDETERMINED,
            unseen=Verdict.UNDETERMINED,
        ),
        Definition(
            name="inference-perf",
            failed=Verdict.UNDETERMINED,
            single_token=Verdict.MISSED,
            unseen=Verdict.MISSED,
        ),
    )
}
