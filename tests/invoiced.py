"""A minute with a bill, of which requests of two tenants take a part."""

from pathlib import Path

from agent.store.connection import open_engine
from tests.outputs.api.serving import Api
from tests.pipeline.minutes import PRICE, Minutes, timed_request
from tests.records.making import NOON


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
    minutes.booked(91.0)
    database.dispose()
    api.agent.now = NOON + 120.0
    return api
