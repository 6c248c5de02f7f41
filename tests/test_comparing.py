"""The `compare` command, called as a user does, on recorded runs and on databases."""

import gzip
import json
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from sqlalchemy import Engine
from typer.testing import CliRunner, Result

from agent.catalog.definitions import Verdict
from agent.catalog.engine_facts import OUTPUT_TOKENS, REQUESTS_FINISHED, TIME_TO_FIRST_TOKEN
from agent.compared_runs import RunUnknown, window_of
from agent.comparing import compare_runs
from agent.errors import AgentError, SettingsInvalid
from agent.records.engine import EngineSample, HistogramSnapshot
from agent.records.engine_counts import EngineCounts
from agent.records.event import Confidence, EventKind
from agent.records.queries import Window
from agent.records.request import Status
from agent.sources.result_files import ResultFileInvalid
from agent.store.claim import AgentState, NameClaim
from agent.store.connection import open_engine
from agent.store.objectives import ObjectiveStore
from agent.store.observations import ObservationStore
from agent.store.run_rows import RunEmpty
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.ports import free_port
from tests.real_parts.postgres import PostgresServer
from tests.records.making import objective
from tests.store.making import NOON, judgement, request, restart, store_in
from tests.store.migrated import migrated, migrated_in

RECORDED = Path(__file__).parent / "data" / "comparison"
SAME = RECORDED / "same-00-before.json.gz", RECORDED / "same-00-after.json.gz"
FIGURES_ONLY = RECORDED / "aiperf-0.13.0" / "profile_export_aiperf.json.gz"
NOW = datetime(2026, 11, 23, 6, 0, tzinfo=UTC)

Call = Callable[..., Result]


@pytest.fixture
def call() -> Call:
    """The command, as from a terminal."""
    app = typer.Typer()
    app.command()(compare_runs)

    def called(before: object, after: object, *options: str) -> Result:
        given = ["--before", str(before), "--after", str(after), *options]
        return CliRunner().invoke(app, given)

    return called


def refused(result: Result, error: type[AgentError], message: str) -> None:
    assert isinstance(result.exception, error), result.output
    with pytest.raises(error, match=message):
        raise result.exception


def changed(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The second recorded run with a change."""
    found: dict[str, Any] = json.loads(gzip.decompress(SAME[1].read_bytes()))
    change(found)
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(found))
    return file


@pytest.mark.slow
def test_the_exit_code_is_for_pipelines(call: Call, tmp_path: Path) -> None:
    def slower(file: dict[str, Any]) -> None:
        file["ttfts"] = [3 * each for each in file["ttfts"]]

    def more_clients(file: dict[str, Any]) -> None:
        file["max_concurrency"] = 16

    assert call(*SAME).exit_code == 0
    assert call(SAME[0], changed(tmp_path, slower)).exit_code == 1
    assert call(changed(tmp_path, slower), SAME[0]).exit_code == 0
    result = call(SAME[0], changed(tmp_path, more_clients))
    assert result.exit_code == 2
    assert "concurrency 8 -> 16" in result.output


def test_without_single_requests_nobody_can_tell(call: Call) -> None:
    result = call(FIGURES_ONLY, FIGURES_ONLY, "--format", "markdown")
    assert result.exit_code == 2
    assert "### :grey_question: Cannot tell" in result.output
    assert "no single requests" in result.output
    # The hint is that of the tool whose file it is.
    assert "(profile_export.jsonl has them)" in result.output
    assert "--save-detailed" not in result.output


def test_the_json_has_base_units_and_null_for_unknown_values(call: Call) -> None:
    result = call(*SAME, "--json", "--ttft-ms", "1000")
    found: dict[str, Any] = json.loads(result.output)
    assert found.keys() == {
        *("verdict", "facts", "load_changes", "before", "after", "load", "figures", "causes")
    }
    assert found["verdict"] == "no evidence"
    assert found["before"]["requests"] == 100
    figures = {each["name"]: each for each in found["figures"]}
    ttft = figures["TTFT p50"]
    assert ttft["before"]["low"] <= ttft["before"]["value"] <= ttft["before"]["high"]
    assert ttft["change"] == pytest.approx(ttft["after"]["value"] / ttft["before"]["value"] - 1)
    assert figures["MFU"]["before"] is None
    assert 0 <= figures["attainment"]["after"]["value"] <= 1
    assert found["causes"] is None


@pytest.mark.parametrize(
    ("given", "seconds_before_now"),
    [
        ("1h", (3600, 0)),
        ("24h/1h", (86400, 82800)),
        ("2026-11-20", (3 * 86400 + 6 * 3600, 2 * 86400 + 6 * 3600)),
        ("2026-11-23T05:00/15m", (3600, 2700)),
        ("2026-11-23T05:00/2026-11-23T05:30", (3600, 1800)),
        ("2026-11-23T06:00+01:00/15m", (3600, 2700)),
    ],
)
def test_a_window_as_text(given: str, seconds_before_now: tuple[int, int]) -> None:
    begin, end = (NOW.timestamp() - each for each in seconds_before_now)
    assert window_of(given, NOW) == Window(from_s=int(begin), until=end)


@pytest.mark.parametrize(
    "given",
    ["yesterday", "2026-11-31", "1h/2026-11-20", "2026-11-20T10:00", "", "5", "1h/-5m", "9e9d/1h"],
)
def test_what_is_no_window_is_refused_with_what_can_be_given(given: str) -> None:
    with pytest.raises(RunUnknown, match=r"is not a run: .* Give a window"):
        window_of(given, NOW)


def fill(engine: Engine) -> None:
    """Two minutes of requests, those of the second take twice as long."""
    random = np.random.default_rng(8)
    judged = []
    for number, ended in enumerate(np.arange(0, 120, 0.5)):
        e2e_s = float(random.lognormal(0, 0.1)) * (0.1 if ended < 60 else 0.2)
        facts: dict[str, Any] = {
            **{"started_at": NOON + ended - e2e_s, "ended_at": NOON + ended},
            **{"e2e_s": e2e_s, "ttft_s": e2e_s / 5, "tpot_s": e2e_s / 25},
            **{"input_tokens": 30, "output_tokens": 20},
        }
        judged.append(request(number, **facts))
    store_in(engine, judged)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    """A database of two minutes."""
    with migrated_in(tmp_path) as engine:
        fill(engine)
        yield engine


def windows() -> tuple[str, str]:
    first, second = (datetime.fromtimestamp(NOON + seconds, UTC).isoformat() for seconds in (0, 60))
    return f"{first}/1m", f"{second}/1m"


def test_two_windows_of_the_configured_database(
    call: Call, database: Engine, tmp_path: Path
) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text(f"storage: {{file: '{database.url.database}'}}")
    result = call(*windows(), "--config", str(config), "--json")
    assert result.exit_code == 1, result.output
    figures = {each["name"]: each for each in json.loads(result.output)["figures"]}
    assert figures["end to end p50"]["verdict"] == "worse"
    assert figures["end to end p50"]["change"] == pytest.approx(1, abs=0.1)
    assert figures["goodput"]["verdict"] == "no evidence"


def test_a_run_of_simulated_engines_says_so(call: Call, database: Engine) -> None:
    first, second = windows()
    runs = (f"{database.url}#{first}", f"{database.url}#{second}")
    assert "SIMULATED" not in call(*runs).output
    NameClaim("demo", "elsewhere:1:1", state=AgentState(simulated=True)).take(database)
    found = json.loads(call(*runs, "--json").output)
    names = [found[run]["name"] for run in ("before", "after")]
    assert names == [f"{run} (SIMULATED)" for run in runs]


def test_two_databases(call: Call, database: Engine, tmp_path: Path) -> None:
    # A copy may lack what is only in the write-ahead log.
    with database.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").close()
    copy = tmp_path / "copy.db"
    shutil.copy(tmp_path / "goodput.db", copy)
    first, second = windows()
    assert call(f"{copy}#{first}", f"{database.url}#{first}", "--json").exit_code == 0
    # The whole has two halves, of which nobody knows how often they come.
    assert call(copy, database.url).exit_code == 2
    assert call(f"{copy}#{first}", f"{database.url}#{second}").exit_code == 1


@pytest.mark.slow
def test_two_databases_of_postgresql_and_two_windows_of_one(
    call: Call, postgres_server: PostgresServer
) -> None:
    with postgres_server.new_database() as before, postgres_server.new_database() as after:
        for url in (before, after):
            with migrated(url) as engine:
                fill(engine)
        first, second = windows()
        assert call(f"{before}#{first}", f"{after}#{first}").exit_code == 0
        for second_url in (before, after):
            result = call(f"{before}#{first}", f"{second_url}#{second}", "--json")
            found = json.loads(result.output)
            assert (result.exit_code, found["verdict"]) == (1, "worse")
            assert (found["before"]["requests"], found["after"]["requests"]) == (120, 120)


def test_a_window_without_requests_is_refused(call: Call, database: Engine) -> None:
    refused(call(f"{database.url}#2020-01-01", database.url), RunEmpty, "no request")
    mistyped = call(database.url, database.url, "--model", "Lama")
    refused(mistyped, RunEmpty, "no request .* in this window; did you mean llama?")


def test_an_engine_that_died_in_a_window_without_requests_is_worse(
    call: Call, database: Engine
) -> None:
    first, _ = windows()
    later = datetime.fromtimestamp(NOON + 7200, UTC).isoformat()
    given = (f"{database.url}#{first}", f"{database.url}#{later}/1h")
    write_events(database, {EventKind.RESTART: NOON + 7300}, Confidence.CERTAIN)
    refused(call(*given), RunEmpty, "no request")
    write_events(database, {EventKind.ENGINE_DEAD: NOON + 7300}, Confidence.CERTAIN)
    result = call(*given)
    assert result.exit_code == 1, result.output
    assert "Failures of engines: 1 ENGINE_DEAD (" in result.output
    assert "No request of `after` has a row, and no engine counted any." in result.output


def count(engine: Engine) -> None:
    """Two minutes without any row: in the second, TTFTs are a bucket or more higher."""
    store = ObservationStore(engine, "agent-0")
    for minute, counts in enumerate([(90.0, 96.0, 100.0), (0.0, 40.0, 100.0)]):
        counted = EngineCounts(
            covered_s=50.0,
            counters={(OUTPUT_TOKENS.name, ()): 5000.0, (REQUESTS_FINISHED.name, ("stop",)): 100.0},
            histograms={TIME_TO_FIRST_TOKEN.name: HistogramSnapshot((0.1, 0.5, inf), counts, 20.0)},
        )
        at = NOON + 60.0 * minute + 55.0
        sample = EngineSample(engine="chat-0", at=at, dialect="vllm", model="llama", facts={})
        store.write_engine_sample(sample, counted)


def test_without_rows_two_windows_have_the_bounds_of_what_engines_counted(
    call: Call, tmp_path: Path
) -> None:
    with migrated_in(tmp_path) as engine:
        count(engine)
        first, second = windows()
        runs = (f"{engine.url}#{first}", f"{engine.url}#{second}")
        found = json.loads(call(*runs, "--json").output)
        text = call(*runs)
    assert (found["verdict"], text.exit_code) == ("unknown", 2)
    assert (found["before"]["requests"], found["before"]["has_requests"]) == (100, False)
    lines = {each["name"]: each for each in (*found["load"], *found["figures"])}
    assert lines["requests/s"]["before"]["value"] == 2
    assert lines["output tokens/s"]["after"]["value"] == 100
    p50 = lines["TTFT p50"]
    assert (p50["before"]["low"], p50["before"]["high"]) == (0, 0.1)
    assert (p50["after"]["low"], p50["after"]["high"]) == (0.5, None)
    # In another bucket it rose; in the same one nobody knows.
    assert p50["change"] > 0
    assert lines["TTFT p99"]["change"] is None
    assert "No request of `before` has a row" in text.output
    assert "bootstrap" not in text.output


@pytest.mark.parametrize(
    ("given", "fact", "expected"),
    [
        ({"is_preset": True}, None, "unknown"),
        ({}, "Target of chat, 80 %: attainment [90.0, 90.0] before, [0.0, 0.0] after.", "worse"),
        ({"is_preset": True}, "Failures of engines: 1 ENGINE_DEAD (2026-09-21", "worse"),
    ],
)
def test_without_rows_a_death_and_a_missed_target_are_worse_and_no_preset_is_a_target(
    call: Call, tmp_path: Path, given: dict[str, Any], fact: str | None, expected: str
) -> None:
    promised = objective(ttft_s=0.1, target=0.8, **given)
    with migrated_in(tmp_path) as engine:
        count(engine)
        ObjectiveStore(engine, "agent-0").write_in_force([promised], NOON)
        if fact and "ENGINE_DEAD" in fact:
            write_events(engine, {EventKind.ENGINE_DEAD: NOON + 70.0}, Confidence.CERTAIN)
        first, second = windows()
        runs = (f"{engine.url}#{first}", f"{engine.url}#{second}")
        text = call(*runs, "--format", "markdown")
        assert json.loads(call(*runs, "--json").output)["verdict"] == expected
    assert text.exit_code == (1 if expected == "worse" else 2)
    assert ("Target of" in text.output, "Failures of engines" in text.output) == (
        bool(fact and "Target of" in fact),
        bool(fact and "Failures of" in fact),
    )
    assert (fact or "") in text.output


def test_windows_side_by_side_share_no_minute_of_what_was_counted(
    call: Call, tmp_path: Path
) -> None:
    with migrated_in(tmp_path) as engine:
        count(engine)
        begin, middle, end = (
            datetime.fromtimestamp(NOON + seconds, UTC).isoformat() for seconds in (-30, 30, 90)
        )
        first = f"{engine.url}#{begin}/{end}"
        found = json.loads(call(first, f"{engine.url}#{middle}/5m", "--json").output)
        refused(call(first, f"{engine.url}#{middle}/50s"), RunEmpty, "no request")
    assert (found["before"]["requests"], found["after"]["requests"]) == (100, 100)


def test_a_point_inside_the_bounds_of_the_other_run_is_no_change(
    call: Call, tmp_path: Path
) -> None:
    with migrated_in(tmp_path) as engine:
        count(engine)
        first, _ = windows()
        run = f"{engine.url}#{first}"
        found = json.loads(call(FIGURES_ONLY, run, "--json").output)
    lines = {each["name"]: each for each in found["figures"]}
    for name in ("TTFT p50", "TTFT p99"):
        point, bounds = lines[name]["before"]["value"], lines[name]["after"]
        inside = bounds["low"] <= point and (bounds["high"] is None or point <= bounds["high"])
        assert (lines[name]["change"] is None) is inside


def test_a_large_archive_is_refused_within_the_memory_of_a_small_one(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.sources.result_files.MAX_BYTES", 1_000_000)
    archive = tmp_path / "bomb.json.gz"
    archive.write_bytes(gzip.compress(bytes(64 * 1024 * 1024), 1))
    tracemalloc.start()
    result = call(archive, archive)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    refused(result, ResultFileInvalid, "it has more than 1,000,000 bytes after decompression")
    assert peak < 16 * 1024 * 1024


def test_a_pipe_and_a_name_that_no_file_can_have_are_no_runs(call: Call, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(call(tmp_path / "pipe", SAME[0]), RunUnknown, "a pipe or a device; write it to a reg")
    refused(call("/dev/zero", SAME[0]), RunUnknown, "a pipe or a device; write it to a regular")
    refused(
        call("x" * 5000, SAME[0]), RunUnknown, r"5002 characters\) is not a run: File name too l"
    )


def test_what_does_not_fit_is_refused(call: Call, database: Engine, tmp_path: Path) -> None:
    refused(call("nothing.json", SAME[0]), RunUnknown, "'nothing.json' is not a run")
    refused(call(f"sqlite:///{tmp_path}/none.db", SAME[0]), RunUnknown, "there is no file")
    assert not (tmp_path / "none.db").exists()
    refused(call(tmp_path, SAME[0]), ResultFileInvalid, "has no profile_export.jsonl")
    (tmp_path / "empty.json").touch()
    refused(call(tmp_path / "empty.json", SAME[0]), ResultFileInvalid, "read: it is empty")
    refused(call(f"{SAME[0]}#x", SAME[0]), RunUnknown, "'x' is not the number of a benchmark")
    refused(call(f"{SAME[0]}#1", SAME[0]), ResultFileInvalid, "no benchmark 1")
    refused(call(database.url, SAME[0], "--ttft-ms", "9"), SettingsInvalid, "judge result files")
    refused(call(*SAME, "--engine", "chat-0"), SettingsInvalid, "select requests of a database")
    refused(call("mysql://u:secret@db/x", SAME[0]), SettingsInvalid, "'mysql' is not supported")


HOUR_S = 3600
# Of 900 requests of an hour: those of the burst, and those that fail.
IN_BURST, FAILING = range(300, 372), range(310, 346, 3)


def store_hour(engine: Engine, begin: float, is_bad: bool) -> None:
    """An hour in which 3 % miss; a bad one has a burst in which nearly all do, and failures."""
    random = np.random.default_rng(int(is_bad))
    judged = []
    for number in range(900):
        waits = is_bad and number in IN_BURST
        fails = is_bad and number in FAILING
        misses = waits or number % 33 == 0
        ttft_s = float(random.lognormal(-1.2, 0.1)) + (25.0 if waits else 0.0)
        ended = begin + number * 4.0
        facts: dict[str, Any] = {
            **{"started_at": ended - ttft_s - 1, "ended_at": ended, "e2e_s": ttft_s + 1},
            **{"ttft_s": ttft_s, "tpot_s": 0.05, "input_tokens": 30, "output_tokens": 20},
            "status": Status.ERROR if fails else Status.OK,
        }
        verdict = judgement(Verdict.MISSED if misses else Verdict.MET)
        judged.append(request(10_000 * is_bad + number, verdict, **facts))
    store_in(engine, judged)


def write_events(engine: Engine, kinds: Mapping[EventKind, float], sure: Confidence) -> None:
    observations = ObservationStore(engine, "agent-0")
    for kind, at in kinds.items():
        observations.write_event(restart(at, kind=kind, confidence=sure))


@pytest.fixture
def two_hours(tmp_path: Path) -> Iterator[tuple[Path, float]]:
    """A running agent's settings, and when the second one of two stored hours begins."""
    bad_from = time.time() // 60 * 60 - HOUR_S - 60
    with migrated_in(tmp_path) as engine:
        store_hour(engine, bad_from - HOUR_S, is_bad=False)
        store_hour(engine, bad_from, is_bad=True)
    settings = {
        "name": "agent-0",
        "engines": [{"name": "chat-0", "url": f"http://127.0.0.1:{free_port()}"}],
        "nvml": {"enabled": False},
        "objectives": [{"name": "chat", "ttft_ms": 1000, "target": 0.9}],
    }
    with AgentProcess.with_settings(tmp_path, AgentPorts.free(), settings):
        yield tmp_path / "agent.yml", bad_from


def hours(config: Path, bad_from: float) -> tuple[str, str, str, str]:
    first, second = (
        datetime.fromtimestamp(bad_from - before, UTC).isoformat() for before in (HOUR_S, 0)
    )
    return f"{first}/1h", f"{second}/1h", "--config", str(config)


@pytest.mark.slow
def test_a_running_agents_hour_with_a_death_an_oom_failures_and_a_missed_target_is_worse(
    call: Call, two_hours: tuple[Path, float]
) -> None:
    config, bad_from = two_hours
    given = hours(config, bad_from)
    events = {EventKind.CUDA_OOM: bad_from + 1500, EventKind.ENGINE_DEAD: bad_from + 1400}
    engine = open_engine(f"sqlite:///{config.parent / 'goodput.db'}")
    write_events(engine, events, Confidence.SUSPECTED)
    assert json.loads(call(*given, "--json").output)["facts"][0]["name"] == "error ratio"
    write_events(engine, events, Confidence.CERTAIN)
    engine.dispose()
    result = call(*given, "--format", "markdown")
    assert (result.exit_code, result.output[:22]) == (1, "### :x: Worse than bef")
    died = f"{datetime.fromtimestamp(bad_from + 1400, UTC):%Y-%m-%dT%H:%M:%SZ}"
    assert f"Failures of engines: 1 ENGINE_DEAD ({died}); none before." in result.output
    assert "Failures of engines: 1 CUDA_OOM (" in result.output
    failed = "Failed: 12 of 900 requests, none of 900 before. All in 1 burst, which may be chance"
    assert failed in result.output
    assert "Target of chat, 90 %: attainment 96.9 % [" in result.output
    assert "One period of `after`, " in result.output
    assert "TTFT p95 +7115 %, without it " in result.output
    found = json.loads(call(*given, "--json").output)
    assert [each["name"] for each in found["facts"]] == [
        *("OOMs", "other failures", "error ratio", "attainment")
    ]
    verdicts = {each["name"]: each["verdict"] for each in found["figures"]}
    for name in ("OOMs", "other failures", "attainment"):
        assert verdicts[name] == "worse", name
    assert verdicts["TTFT p95"] == "one period"
    periods = {each["name"]: each["period"] for each in found["figures"]}
    assert periods["TTFT p95"]["change"] == pytest.approx(0, abs=0.05)
    # As exactly as blocks of a fortieth tell.
    assert periods["TTFT p95"]["begin_s"] == pytest.approx(1200, abs=90)
    assert periods["TTFT p95"]["end_s"] == pytest.approx(1488, abs=90)
    # The good hour is no worse than itself.
    assert call(given[0], given[0], *given[2:]).exit_code == 0


def test_a_burst_alone_leaves_nobody_able_to_tell(call: Call, tmp_path: Path) -> None:
    with migrated_in(tmp_path) as engine:
        store_hour(engine, NOON, is_bad=False)
        store_hour(engine, NOON + HOUR_S, is_bad=True)
        _, second, *_ = hours(tmp_path, NOON + HOUR_S)
        with engine.begin() as connection:
            connection.exec_driver_sql("UPDATE requests SET status = 'ok'")
        first, _, *_ = hours(tmp_path, NOON + HOUR_S)
        result = call(f"{engine.url}#{first}", f"{engine.url}#{second}")
    assert result.exit_code == 2
    assert "Cannot tell: one period makes the difference" in result.output


@pytest.mark.slow
def test_a_result_file_with_first_failures_or_a_missed_target_is_worse(
    call: Call, tmp_path: Path
) -> None:
    def fails(file: dict[str, Any]) -> None:
        file["errors"] = ["" if each % 8 else "it broke" for each in range(len(file["errors"]))]

    result = call(SAME[0], changed(tmp_path, fails))
    assert result.exit_code == 1
    assert "Failed: 13 of 100 requests, none of 100 before." in result.output

    def slower(file: dict[str, Any]) -> None:
        file["ttfts"] = [1.3 * each for each in file["ttfts"]]

    limits = ("--ttft-ms", "2100", "--target", "0.9")
    missed = call(SAME[0], changed(tmp_path, slower), *limits)
    assert "Target of the given limits, 90 %: attainment " in missed.output
