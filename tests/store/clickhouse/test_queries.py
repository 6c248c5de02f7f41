"""The API has the same responses from ClickHouse as from the file that was published to it.

The engine is ClickHouse's own, from chDB; the HTTP in front of it is of the tests.
"""

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple, get_args

import pytest
from sqlalchemy import Engine

from agent.analysis.verdicts import Judge
from agent.catalog.causes import Cause
from agent.catalog.definitions import Verdict
from agent.records.event import Confidence, Event, EventKind
from agent.records.minute import MinuteRow
from agent.records.objective import JudgedRequest
from agent.records.queries import Dimension
from agent.records.request import ProxyView, Status, Vantage
from agent.store.claim import AgentState, NameClaim
from agent.store.minutes import MinuteStore
from agent.store.objectives import ObjectiveStore
from agent.store.observations import ObservationStore
from tests.outputs.api.serving import Api, open_api_at
from tests.real_parts.clickhouse import ClickHouseServer
from tests.records.making import NOON, objective, record
from tests.records.minutes import minute
from tests.store.explaining import explained, share
from tests.store.making import gpu_sample, store
from tests.store.publishing.published import file_in, publishing
from tests.store.views import DUE, JoiningAgent, engine_view, proxy_view

DAY_S = 86400
# The server deletes by its own clock what is too old.
BASE = int(time.time()) // 60 * 60 - 300
AGENT = "agent-0"
OBJECTIVES = (objective("chat"), objective("tokens", tpot_s=0.03, e2e_s=3.0))
_LENGTHS = (None, 30, 900, 2_000, 9_000, 50_000, 120_000)


def _requests(first: int, count: int, before_s: float, seeded: random.Random) -> Iterator[Any]:
    for number in range(first, first + count):
        ended_at = BASE + 300 - seeded.random() * before_s
        ttft_s, tokens = seeded.lognormvariate(-1.8, 0.9), seeded.choice((None, 1, 21, 400))
        tpot_s = None if tokens is None or tokens < 2 else seeded.lognormvariate(-3.7, 0.4)
        e2e_s = ttft_s + (tpot_s or 0.0) * ((tokens or 1) - 1)
        failed = seeded.random() < 0.1
        yield record(
            number,
            started_at=ended_at - e2e_s,
            ended_at=ended_at,
            received_at=ended_at + 0.5,
            engine=seeded.choice(("chat-0", "chat-1")),
            model=seeded.choice(("llama", "qwen", None)),
            tenant=seeded.choice(("acme", "o'neil %s", None)),
            status=seeded.choice([*Status]) if failed else Status.OK,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            e2e_s=e2e_s,
            queue_s=seeded.expovariate(50),
            input_tokens=seeded.choice(_LENGTHS),
            output_tokens=tokens,
            **(_proxied(seeded) if number % 2 else {}),
        )


def _proxied(seeded: random.Random) -> dict[str, Any]:
    view = ProxyView(
        gaps={-340: 19, -300: 1},
        end_user=seeded.choice(("ann", "bob", None)),
        workload=seeded.choice(("batch", None)),
        session=seeded.choice(("s-1", "s-2", None)),
        priority=seeded.choice((0, 1, None)),
    )
    return {"vantage": Vantage.PROXY, "proxied": view}


def fill(file: Engine, api: Api) -> None:
    seeded = random.Random(5)
    judge = Judge(OBJECTIVES)
    records = [*_requests(1, 150, 3600.0, seeded), *_requests(151, 150, 3 * DAY_S, seeded)]
    judged = [judge.judged(each) for each in records]
    store(file, judged)
    api.price(records[:200])
    api.explain(*(_explained(each, seeded) for each in judged[::2] if _missed(each)))
    _join(file)
    _observe(file)
    ObjectiveStore(file, AGENT).write_in_force(OBJECTIVES, BASE)
    claim = NameClaim(AGENT, "elsewhere:1:a", state=AgentState(started_at=BASE))
    claim.take(file)


def _missed(item: JudgedRequest) -> bool:
    return item.judgement.verdict == Verdict.MISSED


def _explained(item: JudgedRequest, seeded: random.Random) -> Any:
    missed = [name for name, verdict in item.judgement.by_objective if verdict == Verdict.MISSED]
    causes = [Cause.BURST, Cause.KV_PRESSURE]
    shares = [
        share(cause, seeded.choice((None, 0.125, 0.5)), objective=name)
        for name in missed
        for cause in causes
    ]
    return explained(item, *shares)


def _join(file: Engine) -> None:
    agent = JoiningAgent(file)
    numbers = range(1001, 1005)
    times: dict[str, Any] = {
        "started_at": BASE + 0.25,
        "ended_at": BASE + 1.25,
        "received_at": BASE + 1.5,
    }
    agent.take(*(proxy_view(number, **times) for number in numbers))
    agent.take(*(engine_view(number, **times) for number in numbers[:2]))
    agent.settle(BASE + DUE - NOON)
    # It began earlier than the proxy's.
    agent.take(engine_view(1003, **times | {"started_at": BASE + 0.125}))


def _observe(file: Engine) -> None:
    observations = ObservationStore(file, AGENT)
    kinds = (EventKind.RESTART, EventKind.KV_PRESSURE, EventKind.CUDA_OOM)
    for place, kind in enumerate(kinds * 3):
        # Three of each moment.
        at = BASE - 60.0 * (place // 3)
        engine = f"chat-{place % 2}"
        event = Event(at=at, engine=engine, kind=kind, confidence=Confidence.CERTAIN)
        observations.write_event(event)
    for second in range(0, 120, 15):
        samples = [gpu_sample(BASE + second), gpu_sample(BASE + second, "GPU-2", index=1)]
        observations.write_gpu_samples(samples)
    MinuteStore(file, AGENT).write([_minute(number) for number in range(30)], (), BASE)


def _minute(number: int) -> MinuteRow:
    starts_at = BASE - 60 * number
    times: dict[str, Any] = {
        "starts_at": starts_at,
        "from_at": float(starts_at),
        "until": starts_at + 60.0,
    }
    return minute(requests=number + 1, engine=f"chat-{number % 2}", **times)


class Both(NamedTuple):
    own: Api
    shared: Api


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory, clickhouse_server: ClickHouseServer
) -> Iterator[Both]:
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("answers")
        file = stack.enter_context(file_in(folder))
        url = stack.enter_context(clickhouse_server.new_database())
        own = stack.enter_context(open_api_at(f"sqlite:///{file.url.database}"))
        fill(file, own)
        with publishing(file, url, objectives=OBJECTIVES):
            pass
        shared = stack.enter_context(open_api_at(url))
        own.agent.now = shared.agent.now = BASE + 333.75
        yield Both(own, shared)


SAME: list[tuple[str, dict[str, str]]] = [
    *(("summary", {"window": window}) for window in ("5m", "3h", "2d", "30d")),
    ("summary", {"window": "5m", "engine": "chat-0"}),
    ("summary", {"window": "3h", "model": "qwen"}),
    ("summary", {"window": "2d", "tenant": "o'neil %s"}),
    ("summary", {"window": "30d", "objective": "tokens"}),
    *(
        ("timeseries", {"window": window, "step": step} | chosen)
        for window, step in (("30m", "10s"), ("3h", "1m"), ("2d", "1h"), ("10d", "1d"))
        for chosen in ({}, {"objective": "chat"})
    ),
    *(
        ("breakdown", {"by": by} | more)
        for by in get_args(Dimension)
        for more in (
            {"window": "3h", "cost": "true", "histograms": "true"},
            {"window": "3d", "objective": "tokens"},
        )
    ),
    ("requests", {}),
    ("requests", {"status": "timeout"}),
    ("requests", {"verdict": "missed"}),
    ("requests", {"objective": "tokens", "verdict": "missed"}),
    ("requests", {"objective": "tokens"}),
    ("requests", {"cause": "burst"}),
    ("requests", {"user": "ann"}),
    ("requests", {"workload": "batch", "priority": "1"}),
    ("requests", {"tenant": "o'neil %s"}),
    ("requests", {"min_ttft_s": "0.15", "max_input_tokens": "9000"}),
    ("requests", {"worst": "e2e", "limit": "20"}),
    ("requests", {"worst": "ttft", "engine": "chat-1", "limit": "20"}),
    ("requests", {"sort": "output_tokens", "order": "asc", "limit": "20"}),
    ("requests", {"id": "chatcmpl-1001-0"}),
    ("requests", {"min_e2e_s": "0.2", "max_e2e_s": "0.6"}),
    ("conversations", {"window": "1h"}),
    ("conversations", {"window": "1d", "engine": "chat-1", "objective": "tokens"}),
    ("conversation", {"session": "s-1"}),
    ("scatter", {"window": "1h"}),
    ("scatter", {"window": "1h", "by": "e2e", "verdict": "missed"}),
    (
        "contrast",
        {
            **{"window": "1d", "by": "e2e", "box_from": "2000-01-01", "box_until": "2100-01-01"},
            "box_min_s": "0.4",
        },
    ),
    *((f"requests/{name}", {}) for name in ("request-7", "request-1003", "chatcmpl-1001-0")),
    ("gpus", {}),
    ("events", {"engine": "chat-1"}),
    ("events", {"kind": "RESTART", "confidence": "certain"}),
    ("efficiency", {"window": "1h"}),
    ("efficiency", {"window": "1h", "engine": "chat-0"}),
    ("lengths", {"window": "1d"}),
    ("lengths", {"window": "1d", "objective": "tokens"}),
    ("objectives", {}),
]
# A cursor has the number of a row, which each database gives. An objective is in force from the
# time when it was written to each. Whether a GPU's sample is of now hangs on the agent's own row.
DIFFERING = ("next", "in_force_from", "stale_after_s")


def without_differing(response: Any) -> Any:
    if isinstance(response, list):
        return [without_differing(each) for each in response]
    if isinstance(response, dict):
        kept = {name: each for name, each in response.items() if name not in DIFFERING}
        return {name: without_differing(each) for name, each in kept.items()}
    return response


@pytest.mark.parametrize(("path", "parameters"), SAME)
def test_both_databases_have_the_same_response(
    both: Both, path: str, parameters: dict[str, str]
) -> None:
    own, shared = (without_differing(api.query(path, **parameters)) for api in both)
    assert shared == own
    assert own.get("items", own.get("groups", [own]))


@pytest.mark.parametrize(("path", "limit"), [("requests", 40), ("events", 7), ("gpus/GPU-1", 7)])
def test_pages(both: Both, path: str, limit: int) -> None:
    """The moments of some events are those of others, so a page may end between these."""
    own, shared = ([*api.pages(path, limit=limit)] for api in both)
    assert shared == own
    assert len(own) > 1


def test_an_unknown_request_is_in_neither(both: Both) -> None:
    assert [api.refusal("requests/nobody")[0] for api in both] == [404, 404]


def test_agents(both: Both) -> None:
    """Each agent reports to each database at another time."""
    (own,), (shared,) = (api.query("agents")["items"] for api in both)
    assert shared.keys() == own.keys()
    assert (shared["name"], shared["version"]) == (own["name"], own["version"])
    assert (shared["waiting_rows"], shared["overdue"]) == (0, False)
    assert shared["silent_s"] >= 0
