"""Makers of requests and objectives with plain default values."""

from collections.abc import Sequence
from typing import Any

from agent.analysis.verdicts import Judge
from agent.catalog.definitions import GOODPUT
from agent.records.gpu import MigInstance
from agent.records.objective import JudgedRequest, Objective
from agent.records.request import RequestRecord, Status, Vantage

# A whole number of minutes, so that minutes and steps start exactly here.
NOON = 1_790_000_040 // 60 * 60

# A MIG instance, and how it is stored and returned.
MIG_INSTANCE = MigInstance(
    uuid="MIG-1",
    name="1g.18gb",
    gpu_instance=7,
    compute_instance=None,
    gpu_slices=1,
    facts={("gpu_memory_used_bytes", ()): 5e9},
    processes={4242: None},
)
MIG_INSTANCE_ROW = {
    "uuid": "MIG-1",
    "name": "1g.18gb",
    "gpu_instance": 7,
    "compute_instance": None,
    "gpu_slices": 1,
    "facts": {"gpu_memory_used_bytes": 5e9},
    "processes": [{"pid": 4242, "memory_bytes": None}],
}


def record(number: int = 1, /, **given: Any) -> RequestRecord:
    """A request of 21 tokens that ended well within a second; `given` replaces its values."""
    facts: dict[str, Any] = {
        "trace_id": f"{number:032x}",
        "span_id": f"{number:016x}",
        "vantage": Vantage.ENGINE,
        "status": Status.OK,
        "started_at": NOON,
        "ended_at": NOON + 0.5,
        "received_at": NOON + 0.6,
        "request_id": f"request-{number}",
        "agent": "agent-0",
        "engine": "chat-0",
        "model": "llama",
        "ttft_s": 0.1,
        "tpot_s": 0.02,
        "e2e_s": 0.5,
        "queue_s": 0.01,
        "prefill_s": 0.09,
        "decode_s": 0.4,
        "input_tokens": 100,
        "output_tokens": 21,
    }
    return RequestRecord(**(facts | given))


def objective(name: str = "chat", /, **given: Any) -> Objective:
    """An objective for all requests; without limits in `given` its TTFT limit is 0.2 s."""
    facts: dict[str, Any] = {"definition": GOODPUT, "target": 0.95, "window_s": 2_592_000.0}
    if not {"ttft_s", "tpot_s", "e2e_s"} & given.keys():
        facts["ttft_s"] = 0.2
    return Objective(name=name, **(facts | given))


def judged(
    records: Sequence[RequestRecord], objectives: Sequence[Objective] = (objective(),)
) -> list[JudgedRequest]:
    """The requests with the verdicts of these objectives."""
    judge = Judge(objectives)
    return [judge.judged(item) for item in records]
