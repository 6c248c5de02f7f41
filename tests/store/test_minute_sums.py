"""Sums of minutes tell what their minutes told, on each kind of database."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pytest
from sqlalchemy import Engine, func, select

from agent.analysis.cost.window_cost import spending
from agent.analysis.efficiency.window_efficiency import window_efficiency
from agent.records.minute import MinuteRow
from agent.records.queries import Selection, Window
from agent.store import minute_sums
from agent.store.minute_sums import MINUTES_KEPT_S, MinuteQueries, merge_minutes
from agent.store.minutes import MinuteStore
from agent.store.rollups import KEEP_S
from agent.store.tables import engine_minutes
from tests.records.minutes import UNKNOWN, minute
from tests.store.making import NOON
from tests.store.test_retention import commits_of

HOURS_KEPT_S = KEEP_S[3600]

# Whatever tells a minute from the one before.
KINDS: Sequence[dict[str, Any]] = (
    {},
    {"busy_s": 10.0, "idle_s": 20.0, "unknown_s": 30.0, "decode_flops": 700.0, "requests": 3},
    {"model": "qwen", "peak_flops_per_s": 1000.0, "peak_bytes_per_s": 20.0},
    UNKNOWN,
    {"gpus": 2, "engine_mfu": 0.3, "hardware_mbu": 0.5, "hardware_mfu": 0.4},
    {"prefill_s": None, "method": "tokens", "joules": None},
    {"gpus_usd": None},
    {"electricity_usd": None, "steps": "estimated"},
    {"cache_full_s": 40.0, "good_tokens_by_objective": {"chat": 5, "long": 2}},
    {"engine_mfu": 0.1, "good_tokens_by_objective": {"chat": 4}},
    {"preemptions": 2.0, "draft_tokens": 20.0, "accepted_draft_tokens": 12.0},
)

ALL = Window(from_s=NOON - 86400, until=NOON + 10 * 86400)


def mixed(count: int) -> list[MinuteRow]:
    """Minutes of each kind in turn, some of them missing; the last two have disagreements."""
    told = [
        minute(number, engine=f"chat-{number % 2}", **KINDS[number % len(KINDS)])
        for number in range(count)
        if number % 13
    ]
    last = max(each.starts_at for each in told)
    odd = {"figure": "mfu", "cause": "unknown"}
    return [
        *told,
        *(
            minute(int(last - NOON // 60 * 60) // 60 + 1, engine=engine, disagreements=(odd,))
            for engine in ("chat-0", "chat-1")
        ),
    ]


def keep(engine: Engine, windows: Sequence[MinuteRow], agent: str = "agent-0") -> None:
    MinuteStore(engine, agent).write(windows, (), NOON)


def rows_in(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(
            connection.execute(select(func.count()).select_from(engine_minutes)).scalar_one()
        )


def flat(told: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every figure by its path."""
    if isinstance(told, Mapping):
        for key, each in told.items():
            yield from flat(each, f"{name}.{key}")
    elif isinstance(told, tuple):
        for place, each in enumerate(told):
            yield from flat(each, f"{name}.{place}")
    else:
        yield name, told


def figures(windows: Sequence[MinuteRow]) -> dict[str, Any]:
    """All that is told of a period."""
    efficiency = window_efficiency(windows)
    assert efficiency is not None
    told = {"efficiency": asdict(efficiency), "spending": asdict(spending(windows))}
    return dict(flat(told)) | {
        "from_at": min(each.from_at for each in windows),
        "until": max(each.until for each in windows),
    }


def agrees(told: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert told.keys() == wanted.keys()
    for name, value in wanted.items():
        close = pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
        assert told[name] == close, name


def test_what_is_told_of_a_period_is_what_its_minutes_add_up_to(database: Engine) -> None:
    kept = mixed(300)
    keep(database, kept)
    told = MinuteQueries(database).minutes(ALL, Selection())
    assert len(told) < 40 < len(kept)
    agrees(figures(told), figures(kept))


@pytest.mark.parametrize("chosen", [{"engine": "chat-1"}, {"model": "qwen"}])
def test_only_the_minutes_that_are_meant_are_added_up(
    database: Engine, chosen: dict[str, str]
) -> None:
    kept = mixed(60)
    keep(database, kept)
    ((name, value),) = chosen.items()
    over = Window(from_s=kept[5].starts_at, until=kept[40].starts_at)
    meant = [each for each in kept[5:40] if getattr(each, name) == value]
    told = MinuteQueries(database).minutes(over, Selection(**chosen))
    agrees(figures(told), figures(meant))


def test_the_tokens_within_each_objective_are_added_up(database: Engine) -> None:
    keep(database, [minute(n, good_tokens_by_objective={"a": 1, "b": n}) for n in range(4)])
    told = MinuteQueries(database).minutes(ALL, Selection())
    assert sum_of(told, "a", "b") == {"a": 4, "b": 6}


def test_minutes_that_did_not_tell_tokens_by_objective_stand_apart(database: Engine) -> None:
    known = [minute(n, good_tokens_by_objective={"a": 1}) for n in (0, 1)]
    keep(database, [*known, *(minute(n, good_tokens_by_objective=None) for n in (2, 3, 4))])
    told = MinuteQueries(database).minutes(ALL, Selection())
    apart = [each.good_tokens_by_objective is None for each in told]
    assert (sum_of(told, "a"), sum(apart)) == ({"a": 2}, 2), "a sum, and the newest minute"


def sum_of(windows: Sequence[MinuteRow], *names: str) -> dict[str, float]:
    by_objective = [each.good_tokens_by_objective or {} for each in windows]
    return {name: sum(each.get(name, 0) for each in by_objective) for name in names}


def test_nothing_was_counted_where_nothing_is_kept(database: Engine) -> None:
    assert MinuteQueries(database).minutes(ALL, Selection()) == []


def test_old_minutes_become_hours_that_tell_the_same(database: Engine) -> None:
    kept = mixed(600)
    keep(database, kept)
    before = rows_in(database)
    hours = merge_minutes(database, "agent-0", NOON + 5 * 3600 + MINUTES_KEPT_S)
    assert hours >= 8
    assert rows_in(database) < before * 0.75
    agrees(figures(MinuteQueries(database).minutes(ALL, Selection())), figures(kept))
    assert merge_minutes(database, "agent-0", NOON + 5 * 3600 + MINUTES_KEPT_S) == 0


def test_old_hours_become_days_that_tell_the_same(database: Engine) -> None:
    kept = [minute(60 * hour, **KINDS[hour // 24 % 3]) for hour in range(24 * 8)]
    keep(database, kept)
    merge_minutes(database, "agent-0", NOON + 5 * 86400 + HOURS_KEPT_S)
    assert rows_in(database) < 24 * 4 + 10
    agrees(figures(MinuteQueries(database).minutes(ALL, Selection())), figures(kept))


def test_young_minutes_and_those_of_other_agents_stay(database: Engine) -> None:
    keep(database, [minute(number) for number in range(120)])
    keep(database, [minute(number) for number in range(120)], "agent-1")
    merge_minutes(database, "agent-0", NOON + 100 * 60 + MINUTES_KEPT_S - 7200)
    assert rows_in(database) == 240


def test_minutes_that_a_late_request_may_reach_stay_however_old_they_are(database: Engine) -> None:
    """As after a long time without an agent."""
    keep(database, [minute(number) for number in range(240)])
    newest = MinuteStore(database, "agent-0").newest("chat-0")
    merge_minutes(database, "agent-0", NOON + 10 * MINUTES_KEPT_S)
    assert MinuteStore(database, "agent-0").newest("chat-0") == newest
    left = MinuteStore(database, "agent-0").between("chat-0", minute(61).starts_at, 4e9)
    minutes = [each for each in left if each.starts_at > minute(61).starts_at]
    assert len(minutes) == 240 - 62
    assert rows_in(database) < 240


def test_minutes_become_hours_slice_by_slice_so_that_others_get_their_turns(
    database: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(minute_sums, "MERGES_PER_SLICE", 2)
    keep(database, [minute(number) for number in range(720)])
    with commits_of(database) as commits:
        hours = merge_minutes(database, "agent-0", NOON + 10 * MINUTES_KEPT_S)
    assert hours == 9
    # Four full slices, one that is not, and no day.
    assert len(commits) == 6


def test_each_column_has_its_way_to_be_added_up() -> None:
    for name in minute_sums._SUMMED:
        assert engine_minutes.c[name].type.python_type in (int, float), name
