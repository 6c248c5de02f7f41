"""Engine's and proxy's views of a request, and an agent that joins them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from sqlalchemy import Engine, select, text

from agent.analysis.verdicts import Judge
from agent.catalog.definitions import GOODPUT
from agent.records.objective import JudgedRequest, Objective, WriteResult
from agent.records.request import ProxyView, RequestRecord, Vantage
from agent.store.tables import requests
from agent.store.transactions import Joining, request_settle, request_write
from tests.store.making import NOON, request

WAIT_S = 10.0
RECEIVED_AT = NOON + 1.5
DUE = RECEIVED_AT + WAIT_S

# The TTFT at the engine meets the objective, the TTFT at the proxy misses it.
CHAT = Objective(name="chat", definition=GOODPUT, target=0.95, window_s=86400.0, ttft_s=0.2)
JUDGE = Judge([CHAT])


def judged(record: RequestRecord) -> JudgedRequest:
    """The judged view, as the pipeline writes it."""
    return JUDGE.judged(record)


def proxy_view(number: int, **given: Any) -> JudgedRequest:
    """The proxy's view of the request of this number; `given` replaces its values."""
    values: dict[str, Any] = {
        "span_id": f"{number:x}".rjust(16, "a"),
        "vantage": Vantage.PROXY,
        "started_at": NOON + 0.125,
        "ended_at": NOON + 1.375,
        "ttft_s": 0.3,
        "tpot_s": 0.02,
        "e2e_s": 1.25,
        "max_gap_s": 0.04,
        "tenant": "acme",
        "http_status": 200,
        "input_tokens": 100,
        "output_tokens": 21,
        "proxied": ProxyView(gaps={-340: 19, -300: 1}, choices=1, streamed=True),
    }
    return judged(request(number, **(values | given)).record)


def engine_view(number: int, child: int = 0, **given: Any) -> JudgedRequest:
    """The engine's view of that request, or of one of its choices."""
    values: dict[str, Any] = {
        "span_id": f"{number:x}".rjust(15, "e") + f"{child:x}",
        "parent_span_id": proxy_view(number).record.span_id,
        "request_id": f"chatcmpl-{number}-{child}",
        "ttft_s": 0.1,
        "tpot_s": 0.019,
        "e2e_s": 1.0,
        "queue_s": 0.05,
        "prefill_s": 0.05,
        "decode_s": 0.9,
        "input_tokens": 100,
        "output_tokens": 21,
        "service_name": "vllm",
    }
    return judged(request(number, **(values | given)).record)


class JoiningAgent:
    """Writes and settles like a running agent; a restarted agent is a new object."""

    def __init__(self, engine: Engine, wait_s: float | None = WAIT_S) -> None:
        joining = Joining(judge=JUDGE, wait_s=wait_s)
        self.write = request_write(engine, joining)
        self.settled = request_settle(engine, joining)

    def settle(self, now: float) -> list[JudgedRequest]:
        """The requests that are counted because their wait has ended."""
        return self.settled(now).counted

    def take(self, *views: JudgedRequest) -> WriteResult:
        """Store these together."""
        return self.write(views)


def rows(engine: Engine) -> list[Mapping[str, Any]]:
    """All rows without their ids, in the order of their spans."""
    order = (requests.c.trace_id, requests.c.span_id)
    with engine.connect() as connection:
        found = connection.execute(select(requests).order_by(*order)).mappings().all()
    return [{str(name): row[name] for name in row if name != "id"} for row in found]


def states(engine: Engine) -> list[tuple[str, bool, bool]]:
    """Of each row: its vantage, whether it is counted, and whether it waits."""
    return sorted(
        (row["vantage"], row["counted"], row["settles_at"] is not None) for row in rows(engine)
    )


def empty(engine: Engine) -> None:
    """Delete every request and rollup."""
    with engine.begin() as connection:
        for table in ("requests", "rollups", "rollup_series", "rollup_changes", "cause_rollups"):
            connection.execute(text(f"DELETE FROM {table}"))


def cut(views: Sequence[JudgedRequest], places: Iterable[int]) -> Iterator[Sequence[JudgedRequest]]:
    """The views in batches, cut at these places."""
    edges = [0, *sorted(places), len(views)]
    return (views[first:last] for first, last in pairwise(edges))
