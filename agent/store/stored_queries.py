"""The queries of the API on a database of either kind."""

from sqlalchemy import Engine

from agent.store.clickhouse.connecting import CLICKHOUSE
from agent.store.clickhouse.queries import ClickHouseQueries
from agent.store.minute_sums import MinuteQueries
from agent.store.store_queries import StoreQueries

_KINDS = {CLICKHOUSE: ClickHouseQueries}


def stored_queries(engine: Engine) -> tuple[StoreQueries, MinuteQueries]:
    """The queries of the API, and those of minutes."""
    kind = _KINDS.get(engine.dialect.name, StoreQueries)
    return kind(engine), MinuteQueries(engine)
