"""Minutes that an earlier version stored, after the migrations."""

from typing import Any

import pytest
from sqlalchemy import Engine, text

from agent.analysis.efficiency.window_efficiency import window_efficiency
from agent.analysis.physics.roofline import Bound
from agent.records.minute import MinuteRow
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from agent.store.minutes import MinuteStore

_FIRST = 1795262400

# The two minutes before 12:02; the KV cache was full in the second.
_INSERT = """
    INSERT INTO engine_windows (agent, engine, starts_at, from_at, until, requests, busy_s,
        idle_s, unknown_s, computed_tokens, cached_tokens, output_tokens, good_tokens,
        cache_full, method, prefill_s, prefill_flops, prefill_bytes, decode_s, decode_flops,
        decode_bytes, peak_flops_per_s, peak_bytes_per_s, disagreements)
    VALUES ('agent-0', 'chat-0', :starts_at, :from_at, :until, 1, 40, 20, 0, 100, 0, 26, 26,
        :cache_full, 'roofline', 10, 500, 10, 30, 150, 150, 100, 10, '[]')
"""
_MINUTES: list[dict[str, Any]] = [
    {
        "starts_at": _FIRST + 60 * minute,
        "from_at": f"2026-11-21 12:0{minute}:00+00:00",
        "until": f"2026-11-21 12:0{minute + 1}:00+00:00",
        "cache_full": minute == 1,
    }
    for minute in (0, 1)
]


def upgraded_minutes(url: str) -> list[MinuteRow]:
    database = open_engine(url)
    upgrade(database, "0005")
    with database.begin() as connection:
        connection.execute(text(_INSERT), _MINUTES)
    upgrade(database)
    found = stored_minutes(database)
    database.dispose()
    return found


def stored_minutes(database: Engine) -> list[MinuteRow]:
    return MinuteStore(database, "agent-0").between("chat-0", _FIRST, _FIRST + 120)


def test_an_upgrade_keeps_minutes_of_an_earlier_version(new_url: str) -> None:
    free, full = upgraded_minutes(new_url)
    assert (free.work.cache_full_s, full.work.cache_full_s) == (0, 40)
    assert (free.work.counted_output_tokens, free.work.shared_bytes, free.work.draft_tokens) == (
        26,
        None,
        None,
    )
    found = [window_efficiency([window]) for window in (free, full)]
    uses = [None if period is None else period.decode for period in found]
    bounds = [None if use is None else use.bound for use in uses]
    assert bounds == [Bound.BANDWIDTH, Bound.CAPACITY]
    assert found[0] is not None
    assert found[0].mbu == pytest.approx(160 / 600)


def test_an_agent_of_the_earlier_version_still_stores_minutes(new_url: str) -> None:
    """It keeps running while another agent upgrades the database of both."""
    database = open_engine(new_url)
    upgrade(database)
    with database.begin() as connection:
        connection.execute(text(_INSERT), _MINUTES)
    found = stored_minutes(database)
    database.dispose()
    assert [window.work.cache_full_s for window in found] == [0, 0]
