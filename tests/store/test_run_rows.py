"""Runs to compare, read from each kind of database."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine

from agent.analysis.comparison.cells import split_runs
from agent.analysis.comparison.measures import MEASURES
from agent.analysis.comparison.run_columns import RunColumns
from agent.analysis.cost.bill import spending
from agent.analysis.efficiency.window_efficiency import window_efficiency
from agent.catalog.definitions import Verdict
from agent.records.event import Confidence, EventKind
from agent.records.queries import Selection, Window
from agent.records.request import Status
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore
from agent.store.run_rows import NO_CAUSE, RunEmpty, read_run, whole_window
from tests.records.minutes import UNKNOWN, minute
from tests.store.making import NOON, judgement, request, restart, store_in

HOUR = Window(from_s=NOON, until=NOON + 3600.0)
MISSED = judgement(Verdict.MISSED, chat=Verdict.MET, batch=Verdict.MISSED)


def read(database: Engine, window: Window = HOUR, **chosen: str) -> RunColumns:
    return read_run(database, "run", window, Selection(**chosen))


def at(seconds: float, **given: Any) -> Mapping[str, Any]:
    return {"started_at": NOON + seconds - 1, "ended_at": NOON + seconds, **given}


def figures(run: RunColumns) -> dict[str, float]:
    alone, _ = split_runs(run, run)
    pairs = {measure.name: measure.pair(alone, alone) for measure in MEASURES}
    return {name: pair.before.value for name, pair in pairs.items() if pair is not None}


@pytest.fixture
def stored(database: Engine) -> Engine:
    """Six requests that end in the hour, and others."""
    known = {"ttft_s": 0.2, "tpot_s": 0.01, "e2e_s": 1.5, "input_tokens": 30, "output_tokens": 9}
    store_in(
        database,
        [
            request(1, **at(0.5, **known)),
            request(2, MISSED, **at(10.0, **known | {"ttft_s": 0.9}, cause="burst")),
            request(3, judgement(Verdict.UNDETERMINED), **at(20.0, status=Status.CANCELLED)),
            request(4, judgement(Verdict.MISSED), **at(30.0, status=Status.TIMEOUT)),
            request(5, **at(40.0, status=Status.INVALID, ttft_s=0.001, e2e_s=0.001)),
            request(6, **at(50.0, engine="chat-1", **known)),
            request(7, **at(-5.0, **known)),
            request(8, **at(3600.0, **known)),
        ],
    )
    return database


def test_requests_become_columns(stored: Engine) -> None:
    run = read(stored)
    order = np.argsort(run.ended_s)

    def column(name: str) -> list[float | None]:
        return [None if np.isnan(each) else each for each in getattr(run, name)[order]]

    assert run.ended_s[order] == pytest.approx([0.5, 10, 20, 30, 40, 50], abs=2e-3)
    assert run.length_s == pytest.approx(3600)
    assert column("ttft_s") == [0.2, 0.9, None, None, None, 0.2]
    assert column("e2e_s") == [1.5, 1.5, None, None, None, 1.5]
    assert column("output_tokens") == [9, 9, None, None, None, 9]
    assert column("met") == [1, 0, None, 0, 1, 1]
    # What a client cancelled or spoilt is no part of an error ratio.
    assert column("failed") == [0, 0, None, 1, None, 0]
    assert run.causes == {"burst": 1, NO_CAUSE: 1}


def test_one_objective_one_engine_or_one_model_is_read(stored: Engine) -> None:
    chat, batch = (read(stored, objective=name) for name in ("chat", "batch"))
    assert (float(np.nansum(chat.met)), chat.requests) == (4.0, 6)
    assert (batch.met.tolist(), batch.requests) == ([0], 1)
    assert read(stored, engine="chat-1").requests == 1
    assert read(stored, model="llama").requests == 6


def test_a_run_begins_with_its_data(stored: Engine) -> None:
    run = read(stored, Window(from_s=NOON - 7200, until=NOON + 60.0))
    assert run.requests == 7
    # The rollup of the first request begins at 10 s before noon.
    assert run.length_s == pytest.approx(70)


def test_all_of_a_database(stored: Engine) -> None:
    window = whole_window(stored)
    assert window.from_s == NOON - 5
    assert window.until == pytest.approx(NOON + 3600.001)
    assert read(stored, window).requests == 8


def test_nothing_is_no_run(database: Engine) -> None:
    with pytest.raises(RunEmpty, match="no request"):
        read(database)
    with pytest.raises(RunEmpty, match="no request"):
        whole_window(database)


def test_use_and_cost_are_those_of_the_api(stored: Engine) -> None:
    booked = [minute(0), minute(1, **UNKNOWN), minute(2, gpus_usd=2.0, prefill_flops=900.0)]
    outside = minute(59, from_at=NOON + 3550.0, until=NOON + 3610.0, gpus_usd=99.0)
    MinuteStore(stored, "agent-0").write([*booked, outside], (), NOON)
    run, efficiency, cost = read(stored), window_efficiency(booked), spending(booked)
    assert efficiency is not None
    assert cost.ratios is not None
    found = figures(run)
    assert found["MFU"] == pytest.approx(efficiency.mfu)
    assert found["MBU"] == pytest.approx(efficiency.mbu)
    per_good = cost.ratios.allocated_per_million_good_tokens
    assert found["USD per million good tokens"] == pytest.approx(per_good)
    # Two minutes with a price have 200 output tokens each.
    assert found["USD per million output tokens"] == pytest.approx(cost.bill_usd / 400 * 1e6)
    # The bill of an engine is that of all its tenants.
    store_in(stored, [request(9, **at(60.0, tenant="acme"))])
    assert not {"MFU", "USD per million good tokens"} & figures(read(stored, tenant="acme")).keys()


def test_events_are_counted(stored: Engine) -> None:
    observations, oom = ObservationStore(stored, "agent-0"), EventKind.CUDA_OOM
    for event in (
        restart(NOON + 30.0, kind=oom),
        restart(NOON + 40.0, kind=oom),
        restart(NOON + 40.0, engine="chat-1", kind=EventKind.HANG),
        restart(NOON + 3600.0, kind=oom),
    ):
        observations.write_event(event)
    run = read(stored)
    assert run.events is not None
    assert {kind: times.tolist() for kind, times in run.events.items()} == {
        EventKind.CUDA_OOM: pytest.approx([30.0, 40.0]),
        EventKind.HANG: pytest.approx([40.0]),
    }
    assert figures(run)["OOMs"] == pytest.approx(2)
    assert figures(read(stored, engine="chat-0"))["other failures"] == 0


def test_suspected_events_are_left_out_and_those_of_engines_without_the_model(
    stored: Engine,
) -> None:
    observations, dead = ObservationStore(stored, "agent-0"), EventKind.ENGINE_DEAD
    observations.write_event(restart(NOON + 30.0, kind=dead, confidence=Confidence.SUSPECTED))
    observations.write_event(restart(NOON + 40.0, kind=dead, confidence=Confidence.PROBABLE))
    observations.write_event(restart(NOON + 50.0, kind=dead, engine="of another model"))
    assert (read(stored).events or {})[dead].tolist() == pytest.approx([40.0, 50.0])
    assert (read(stored, model="llama").events or {})[dead].tolist() == pytest.approx([40.0])


def test_each_target_has_the_verdicts_of_its_objective(stored: Engine) -> None:
    run = read_run(stored, "run", HOUR, Selection(), {"chat": 0.9, "batch": 0.5})
    assert run.began_at == pytest.approx(NOON)
    known = {name: each.met[np.isfinite(each.met)] for name, each in run.objectives.items()}
    assert {name: each.target for name, each in run.objectives.items()} == {
        "chat": 0.9,
        "batch": 0.5,
    }
    assert (sorted(known["chat"]), known["batch"].tolist()) == ([0, 1, 1, 1, 1], [0])
