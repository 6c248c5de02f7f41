"""A report of two hours of traffic, with minutes, causes and events."""

from pathlib import Path
from typing import Any

from agent.catalog.causes import Cause
from agent.outputs.report.document import ReportFigures, read_figures
from agent.outputs.report.tables import Json
from agent.records.event import Confidence, Event, EventKind
from agent.store.connection import open_engine
from tests.outputs.api.serving import Api
from tests.outputs.api.test_engine_counts import counts
from tests.outputs.api.traffic import NOW, OBJECTIVES, mixed
from tests.pipeline.minutes import PRICE, Minutes, timed_request
from tests.records.making import NOON, judged, objective, record
from tests.records.minutes import minute
from tests.store.explaining import explained, share


def filled(api: Api) -> None:
    """Store the traffic, two minutes with their counters, and an event."""
    api.agent.now = NOW
    api.store(mixed(), OBJECTIVES)
    api.set_objectives(OBJECTIVES)
    late = record(9000, ended_at=NOW - 5, ttft_s=1.2)
    api.store([late], [objective("chat")])
    (item,) = judged([late], [objective("chat")])
    api.explain(explained(item, share(Cause.BURST, 0.75), share(Cause.KV_PRESSURE, 0.25)))
    cache = {"prefix_query_tokens": 1000.0, "prefix_hit_tokens": 250.0}
    batch = {"running_request_s": 90.0, "place_s": 360.0}
    api.store_minutes(minute(0, **cache, **batch), minute(1))
    evidence: dict[str, Any] = {"restarts": 1.0, "line": "a\x1b[31mred | <b>"}
    api.store_engine_sample("chat-0", NOW - 10.0, counts())
    api.store_events(
        Event(
            at=NOW - 60,
            engine="chat-0",
            kind=EventKind.RESTART,
            confidence=Confidence.CERTAIN,
            evidence=evidence,
        )
    )


def figures(api: Api, window: str = "2h") -> ReportFigures:
    """The figures of a window, read as the command reads them."""

    def read(route: str, **parameters: str | int) -> Json:
        response: Json = api.query(route, **parameters)
        return response

    return read_figures(read, {"window": window}, lambda: None)


def invoiced(api: Api, folder: Path) -> Api:
    """A minute at 0.1 cent a second: 10 s of acme, 10 s of globex, 10 s that are in no row."""
    database = open_engine(f"sqlite:///{folder / 'goodput.db'}")
    minutes = Minutes(database, PRICE)
    for at in range(0, 91, 5):
        # Two seconds of prefill, then 26 tokens in eight.
        output = sum(26 * min(max(at - begin - 2, 0), 8) / 8 for begin in (10, 30, 40))
        steps = output + sum(at > begin for begin in (10, 30, 40))
        running = float(10 <= at < 20 or 30 <= at < 50)
        counts = {"steps": steps, "output": output, "input": 100.0 * (steps - output)}
        minutes.read_one(at, running=running, waiting=0.0, **counts)
    minutes.take(
        timed_request(1, 10.0, 10.0, tenant="acme"),
        timed_request(2, 30.0, 10.0, tenant="=globex()"),
    )
    minutes.computed(91.0)
    database.dispose()
    api.agent.now = NOON + 120.0
    return api
