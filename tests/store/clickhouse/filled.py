"""A file with everything that an agent stores: days of requests of several engines."""

import random
import time
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Engine

from agent.analysis.verdicts import Judge
from agent.catalog.causes import Cause
from agent.catalog.definitions import Verdict
from agent.records.event import Confidence, Event, EventKind
from agent.records.minute import MinuteRow
from agent.records.objective import JudgedRequest
from agent.records.request import ProxyView, Status, Vantage
from agent.store.claim import AgentState, NameClaim
from agent.store.minutes import MinuteStore
from agent.store.objectives import ObjectiveStore
from agent.store.observations import ObservationStore
from tests.outputs.api.serving import Api
from tests.records.making import NOON, objective, record
from tests.records.minutes import minute
from tests.store.explaining import explained, share
from tests.store.making import gpu_sample, store
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
    """Store some hundred requests, and of everything else a little."""
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
    """Two joined in time, one late, one of the proxy alone."""
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
