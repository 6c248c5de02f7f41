"""The series of an agent's rollups: found by their key, and bounded in number.

Senders choose the names of models and tenants. Beyond the bound, the requests of a new series are
folded into a series whose model and tenant are `other`, so that folding and queries stay as quick.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

from sqlalchemy import Connection, func, insert, select, tuple_

from agent.catalog.metrics import OTHER
from agent.store.rollups import ANY_LENGTH, Series
from agent.store.tables import rollup_series

_LOG = logging.getLogger(__name__)

# Of one agent, without the series of any length: a summary of a window reads a rollup of each.
MAX_SERIES = 10_000

_warned_agents: set[str] = set()

# With six columns each, these are fewer parameters than SQLite takes: 32,766.
_KEYS_PER_READ = 2000

_COLUMNS = [rollup_series.c[name] for name in Series._fields]


def target_series(
    connection: Connection, agent: str, wanted: Sequence[Series], most: int
) -> dict[Series, Series]:
    """The series into which each of these is folded: itself, or the one of `other`.

    A new series beyond `most` is folded into `other`. A stored series stays itself, so what was
    added to it is also subtracted from it.
    """
    stored = series_ids(connection, wanted).keys()
    new = [series for series in dict.fromkeys(wanted) if series not in stored]
    if not new:
        return {series: series for series in wanted}
    room = max(most - _count(connection, agent), 0)
    beyond = set(new[room:])
    if beyond and agent not in _warned_agents:
        _warned_agents.add(agent)
        _LOG.warning(
            "the rollups of %s have %d series of models and tenants, which is storage.max_series: "
            "new ones are counted as %r from now on",
            agent,
            most,
            OTHER,
        )
    return {series: other_series(series) if series in beyond else series for series in wanted}


def other_series(series: Series) -> Series:
    """The series of `other` for a series. An unknown model or tenant stays unknown."""
    return series._replace(model=series.model and OTHER, tenant=series.tenant and OTHER)


def _count(connection: Connection, agent: str) -> int:
    query = select(func.count()).where(
        rollup_series.c.agent == agent, rollup_series.c.input_length != ANY_LENGTH
    )
    return int(connection.execute(query).scalar_one())


def series_ids(connection: Connection, wanted: Collection[Series]) -> dict[Series, int]:
    """The row numbers of these series, where a series is stored."""
    ids = {}
    for part in _parts(wanted):
        query = select(rollup_series.c.id, *_COLUMNS).where(tuple_(*_COLUMNS).in_(part))
        ids.update({Series(*key): row_id for row_id, *key in connection.execute(query)})
    return ids


def _parts(wanted: Collection[Series]) -> Iterator[list[Series]]:
    left = iter(wanted)
    while part := list(islice(left, _KEYS_PER_READ)):
        yield part


def stored_ids(connection: Connection, wanted: Collection[Series]) -> Mapping[Series, int]:
    """The row numbers of these series; new series are inserted."""
    ids = series_ids(connection, wanted)
    new = sorted(set(wanted) - ids.keys())
    if new:
        connection.execute(insert(rollup_series), [series._asdict() for series in new])
        ids.update(series_ids(connection, new))
    return ids
