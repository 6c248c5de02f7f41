"""Groups that only rows have are bounded in number, in either kind of database."""

from collections import Counter
from typing import Any

import pytest
from sqlalchemy import Engine

from agent.records.minute import RequestCost
from agent.records.queries import OF_ROWS, Dimension, Selection, Window
from agent.records.request import ProxyView, Vantage
from agent.store.minutes import MinuteStore
from agent.store.row_groups import MAX_GROUPS
from agent.store.store_queries import StoreQueries
from tests.store.making import NOON, publish, request, store

OVER = Window(from_s=int(NOON), until=NOON + 60, ends_now=True)
NAMES = MAX_GROUPS + 200
# These have two requests each, the others one.
BUSY = range(NAMES - 10, NAMES)
PRICE_USD = 0.25


@pytest.mark.parametrize("by", sorted(OF_ROWS))
def test_the_busiest_groups_have_figures_of_their_own_and_the_rest_is_one(
    database: Engine, by: Dimension
) -> None:
    named = [*range(NAMES), *BUSY]

    def write(file: Engine) -> None:
        store(
            file,
            [
                request(n, vantage=Vantage.PROXY, proxied=proxied(by, name))
                for n, name in enumerate(named, start=1)
            ],
        )
        store(file, [request(len(named) + 1)])
        costs = [
            RequestCost(row=row, vantage=Vantage.PROXY.value, complete=True, cost_usd=PRICE_USD)
            for row in range(1, len(named) + 1)
        ]
        MinuteStore(file, "agent-0").write((), costs, NOON)

    publish(database, write)
    queries = StoreQueries(database)

    tallies = queries.tallies_by(by, OVER, Selection())
    requests = {name: tally.requests for name, tally in tallies.items()}
    busy = {str(name) for name in BUSY}
    assert {requests.pop(name) for name in busy} == {2}
    assert (requests.pop("other"), requests.pop(None)) == (NAMES - MAX_GROUPS, 1)
    assert Counter(requests.values()) == {1: MAX_GROUPS - len(BUSY)}

    groups = queries.costs_by(by, OVER, Selection())
    assert groups.keys() == tallies.keys()
    assert groups["other"].cost_usd == (NAMES - MAX_GROUPS) * PRICE_USD
    assert {groups[name].cost_usd for name in busy} == {2 * PRICE_USD}
    assert groups[None].cost_usd is None


def proxied(by: Dimension, name: int) -> ProxyView:
    """What the proxy saw of a request of this group."""
    if by == "priority":
        return ProxyView(priority=name)
    names: dict[str, Any] = {"end_user" if by == "user" else by: str(name)}
    return ProxyView(**names)
