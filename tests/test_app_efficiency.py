"""Efficiency and cost from a running agent."""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import Engine

from agent.app.engines import EfficiencyJobs, GpuJobs
from agent.app.jobs import Jobs
from agent.catalog import gpu_facts
from agent.catalog.engine_facts import REQUESTS_FINISHED
from agent.outputs.prometheus.meter import Meter
from agent.records.engine import EngineSample
from agent.records.gpu import GpuSample, GpuSamples
from agent.records.objective import JudgedRequest
from agent.settings import Settings
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore
from tests.analysis.cost.engine_days import COUNTS, key
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S
from tests.sources.model_config.published import PUBLISHED
from tests.sources.nvml.fake_driver import build, gpu_uuid
from tests.store.making import NOON, request, store

# Llama-3.1-8B: hidden width, layers, query heads, KV heads, head width, feed-forward width, words.
D, L, Q, G, HEAD, WIDE, V = 4096, 32, 32, 8, 128, 14336, 128256
LINEAR = L * (D * HEAD * (2 * Q + 2 * G) + 3 * D * WIDE)
KV_BYTES = 2 * G * HEAD * 2 * L
H200_FLOPS, H200_BYTES = 989.4e12, 4.8e12

PROMPT, DECODED, DECODE_S = 1000, 5000, 50.0
A_SECOND_USD = 0.001

# Of the request, by hand.
ATTENDED = DECODED * PROMPT + DECODED * (DECODED + 1) // 2
DECODE_FLOPS = DECODED * 2 * (LINEAR + D * V) + 4 * Q * HEAD * L * ATTENDED
PREFILL_FLOPS = 2 * (LINEAR * PROMPT + D * V) + 4 * Q * HEAD * L * PROMPT * (PROMPT + 1) // 2


def moved_bytes(steps: int, weight_bytes: int = 2, cache_bytes: int = 2) -> float:
    """Each step reads the weights; the words keep their width."""
    weights = steps * (LINEAR * weight_bytes + D * V * 2)
    return weights + KV_BYTES / 2 * cache_bytes * (ATTENDED + DECODED)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a driver that shows an H200."""
    folder = tmp_path_factory.mktemp("driver")
    build(folder)
    return folder


FACTS = {
    **{name: key(metric) for name, metric in COUNTS.items()},
    "finished": key(REQUESTS_FINISHED, "stop"),
}


def sample(engine: str, at: float, **values: float) -> EngineSample:
    return EngineSample(
        engine=engine,
        at=at,
        dialect="vllm",
        model="llama",
        facts={FACTS[name]: value for name, value in values.items()},
    )


@contextmanager
def earlier_run(folder: Path) -> Iterator[tuple[Engine, ObservationStore, float]]:
    """The database and the samples of an earlier run, and the minute in which it began."""
    database = open_engine(f"sqlite:///{folder / 'goodput.db'}")
    upgrade(database)
    begin = time.time() // 60 * 60 - 240.0
    yield database, ObservationStore(database, "agent-0"), begin
    database.dispose()


def past_minutes(folder: Path, engines: Sequence[str], untraced: Sequence[str] = ()) -> None:
    """Stores two minutes of each engine, with a request in the first; some have no row of it."""
    with earlier_run(folder) as (database, observations, begin):
        for engine, step in product([*engines, *untraced], range(25)):
            done = min(max(5.0 * step - 1.0, 0.0), DECODE_S) / DECODE_S
            observations.write_engine_sample(
                sample(
                    engine,
                    begin + 5.0 * step,
                    running=float(0 < step <= 10),
                    input=PROMPT * float(step > 0),
                    output=1.0 * (step > 0) + DECODED * done,
                    steps=1.0 * (step > 0) + DECODED * done,
                    finished=float(step > 10),
                )
            )
        store(database, [the_request(begin, n, engine) for n, engine in enumerate(engines)])


def the_request(begin: float, number: int, engine: str) -> JudgedRequest:
    """A second of prefill, and 100 tokens/s for 50 seconds."""
    return request(
        number,
        engine=engine,
        started_at=begin,
        ended_at=begin + 1.0 + DECODE_S,
        received_at=begin + 52.0,
        queue_s=0.0,
        prefill_s=1.0,
        decode_s=DECODE_S,
        ttft_s=1.0,
        e2e_s=1.0 + DECODE_S,
        input_tokens=PROMPT,
        cached_tokens=0,
        output_tokens=DECODED + 1,
    )


def agent_of(
    folder: Path, driver: Path, engines: Mapping[str, Mapping[str, Any]], **more: Any
) -> AgentProcess:
    """An agent whose engines are no longer running; each has a GPU of its own."""
    content = {
        "name": "agent-0",
        "engines": [
            {"name": name, "url": f"http://127.0.0.1:{free_port()}", "gpus": [gpu], **fields}
            for gpu, (name, fields) in enumerate(engines.items())
        ],
        **more,
    }
    environment = {"LD_LIBRARY_PATH": str(driver), "STANDIN_GPUS": str(len(engines))}
    return AgentProcess.with_settings(folder, AgentPorts.free(), content, environment)


def counted(agent: AgentProcess, engine: str) -> dict[str, Any]:
    """The summary of an engine, once it includes the missed minutes."""
    return eventually(
        lambda: (
            found
            if (found := agent.api.summary(window="10m", engine=engine))["efficiency"]
            or found["cost"]
            else {}
        ),
        within_s=WITHIN_S,
        what="counted minutes",
    )


def llama(folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(PUBLISHED["llama-3.1-8b"]["config"]))
    return str(path)


STORED_BYTES = 16_060_522_496
WORDS_BYTES = 2 * V * D


def strange(folder: Path) -> str:
    """A model of an unknown architecture, with the index of its files."""
    (folder / "strange").mkdir()
    config = {**PUBLISHED["llama-3.1-8b"]["config"], "model_type": "strange"}
    (folder / "strange/config.json").write_text(json.dumps(config))
    names = dict.fromkeys(
        ("model.embed_tokens.weight", "lm_head.weight"), "model-00001.safetensors"
    )
    index = {"metadata": {"total_size": STORED_BYTES}, "weight_map": names}
    (folder / "strange/model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder / "strange")


@dataclass(frozen=True, slots=True)
class Counted:
    """What an agent says of engines after the minutes that an earlier run did not compute."""

    summaries: Mapping[str, dict[str, Any]]
    rows: Mapping[str, dict[str, Any]]
    page: str
    setups: Mapping[str, dict[str, Any]]


@pytest.fixture(scope="module")
def missed(tmp_path_factory: pytest.TempPathFactory, driver: Path) -> Counted:
    folder = tmp_path_factory.mktemp("missed")
    known = {"model_config": llama(folder)}
    engines: dict[str, dict[str, Any]] = {
        "chat": {**known, "gpu_hour_usd": 3.6},
        "fp8": {**known, "dtype": "fp8"},
        "given": {**known, "kv_dtype": "fp8", "peak_tflops": 500, "bandwidth_gb_per_s": 4000},
        "unknown": {},
        "strange": {"model_config": strange(folder)},
    }
    past_minutes(folder, [*engines], ["untraced"])
    engines["untraced"] = known
    prices = [{"gpu": "H200-SXM", "gpu_hour_usd": 7.2}]
    with agent_of(folder, driver, engines, prices=prices) as agent:
        summaries = {name: counted(agent, name) for name in engines}
        rows = {row["engine"]: row for row in agent.api.requests()}
        setups = {each["engine"]: each for each in agent.api.items("/api/v1/setup", {})}
        return Counted(summaries, rows, agent.api.exposition(), setups)


def test_missed_minutes_are_computed_at_the_start_as_computed_by_hand(missed: Counted) -> None:
    summary, row = missed.summaries["chat"], missed.rows["chat"]
    decode = summary["efficiency"]["decode"]
    assert decode["mfu"] == pytest.approx(DECODE_FLOPS / DECODE_S / H200_FLOPS)
    assert decode["mbu"] == pytest.approx(moved_bytes(DECODED) / DECODE_S / H200_BYTES, rel=0.001)
    assert decode["bound"] == "bandwidth-bound"
    assert summary["efficiency"]["prefill"]["mfu"] == pytest.approx(PREFILL_FLOPS / H200_FLOPS)
    assert row["decode_flops"] == pytest.approx(DECODE_FLOPS)
    assert row["prefill_flops"] == pytest.approx(PREFILL_FLOPS)
    assert row["cost_usd"] == pytest.approx(51 * A_SECOND_USD, rel=0.001)
    costs_add_up(summary["cost"], row["cost_usd"])
    published = total(missed.page, "llm_cost_usd_total", engine="chat")
    assert published == pytest.approx(summary["cost"]["bill_usd"])
    assert 'source="engine"' not in missed.page, "it publishes no estimate of its own"


@pytest.mark.parametrize(
    ("engine", "weight_bytes", "cache_bytes", "peak", "bandwidth"),
    [("fp8", 1, 2, 1978.9e12, H200_BYTES), ("given", 2, 1, 500e12, 4e12)],
)
def test_configured_figures_of_model_and_gpu_are_used(
    missed: Counted,
    engine: str,
    weight_bytes: int,
    cache_bytes: int,
    peak: float,
    bandwidth: float,
) -> None:
    decode = missed.summaries[engine]["efficiency"]["decode"]
    moved = moved_bytes(DECODED, weight_bytes, cache_bytes)
    assert decode["mfu"] == pytest.approx(DECODE_FLOPS / DECODE_S / peak)
    assert decode["mbu"] == pytest.approx(moved / DECODE_S / bandwidth, rel=0.001)


def test_the_files_of_an_unknown_architecture_tell_the_bytes_of_decode(missed: Counted) -> None:
    summary, row = missed.summaries["strange"], missed.rows["strange"]
    moved = DECODED * (STORED_BYTES - WORDS_BYTES)
    decode = summary["efficiency"]["decode"]
    assert decode["mbu"] == pytest.approx(moved / DECODE_S / H200_BYTES, rel=0.001)
    assert summary["efficiency"]["weights_alone"]
    assert not missed.summaries["chat"]["efficiency"]["weights_alone"]
    # What no file tells is unknown.
    assert (decode["mfu"], decode["achieved_flops_per_s"], decode["bound"]) == (None, None, None)
    assert (summary["mfu"], summary["mbu"], summary["efficiency"]["prefill"]) == (None, None, None)
    assert (row["decode_flops"], row["prefill_flops"]) == (None, None)
    assert summary["cost"]["methods"] == ["tokens"]


def test_the_setup_says_what_the_files_of_an_unknown_architecture_give(missed: Counted) -> None:
    steps = {step["name"]: step for step in missed.setups["strange"]["steps"]}
    (action,) = steps["model config"]["actions"]
    assert action["where"] == (
        "the architecture 'strange' is unknown, and MFU with it; its files give MBU of decode"
    )


def test_a_price_of_a_gpu_product_applies_to_an_engine_without_one(missed: Counted) -> None:
    summary = missed.summaries["unknown"]
    assert summary["cost"]["bill_usd"] == pytest.approx(summary["cost"]["gpu_hours"] * 7.2)
    assert summary["cost"]["methods"] == ["tokens"], "the model is not known"
    assert summary["mfu"] is None


def test_an_engine_without_any_row_has_its_use_cost_and_ledger_by_what_it_counted(
    missed: Counted,
) -> None:
    untraced = missed.summaries["untraced"]
    sources = untraced["efficiency"]["sources"]
    assert sources["requests"]["mfu"] is None
    assert untraced["mfu"] == sources["counters"]["mfu"]
    flops = DECODE_FLOPS + PREFILL_FLOPS
    assert untraced["mfu"] * H200_FLOPS * 120 == pytest.approx(flops, rel=0.01)
    moved = moved_bytes(DECODED + 1)
    assert untraced["mbu"] * H200_BYTES * 120 == pytest.approx(moved, rel=0.01)
    cost = untraced["cost"]
    assert cost["usd_per_million_output_tokens"] is None
    ledger = untraced["ledger"]
    vanished = {"input_tokens": PROMPT, "output_tokens": DECODED + 1, "requests": None}
    assert ledger["counted"] == ledger["unaccounted"] == vanished
    assert ledger["unaccounted_usd"] == cost["unseen_usd"]
    for name in ("input_tokens", "output_tokens"):
        published = total(missed.page, f"llm_unaccounted_{name}_total", engine="untraced")
        assert published == vanished[name]
    dollars = cost["allocated_usd_per_million_output_tokens"]
    assert dollars == pytest.approx(cost["bill_usd"] / (DECODED + 1) * 1e6)


ENGINE_FLOPS, ENGINE_READ, ENGINE_WRITTEN = 1.2e14, 8e13, 1e12
TENSOR_ACTIVE, CLOCK_RATIO, MEMORY_ACTIVE = 0.004, 0.5, 0.6


def past_minutes_of_three_sources(folder: Path) -> None:
    """Stores four minutes with the same request in each, with engine and GPU counters."""
    with earlier_run(folder) as (database, observations, begin):
        for step in range(49):
            minute, second = divmod(5.0 * step, 60)
            done = DECODED * min(max(second - 1.0, 0.0), DECODE_S) / DECODE_S
            steps = 1.0 * (second > 0) + done
            so_far = minute + steps / (DECODED + 1)
            counters = {
                "running": float(0 < second <= 50),
                "input": PROMPT * (minute + (second > 0)),
                "output": minute * (DECODED + 1) + steps,
                "steps": minute * (DECODED + 1) + steps,
                "preemptions": minute,
                "flops": ENGINE_FLOPS * (1 + so_far),
                "read": ENGINE_READ * (1 + so_far),
                "written": ENGINE_WRITTEN * (1 + so_far),
            }
            observations.write_engine_sample(sample("chat", begin + 5.0 * step, **counters))
        gpus = [gpu_at(begin + 60.0 * minute + 30.0) for minute in range(4)]
        observations.write_gpu_samples(gpus)
        store(database, [the_request(begin + 60.0 * n, n + 1, "chat") for n in range(4)])


def gpu_at(at: float) -> GpuSample:
    """A sample of the driver's H200 with its own counters."""
    facts = {
        key(gpu_facts.TENSOR_ACTIVE): TENSOR_ACTIVE,
        key(gpu_facts.DRAM_ACTIVE): MEMORY_ACTIVE,
        key(gpu_facts.UTILIZATION): 1.0,
        key(gpu_facts.CLOCK, "sm"): 1.98e9 * CLOCK_RATIO,
        key(gpu_facts.CLOCK_MAX, "sm"): 1.98e9,
    }
    return GpuSample(gpu=gpu_uuid(0), index=0, name="NVIDIA H200", at=at, facts=facts)


def test_disagreements_of_three_sources_are_reported_with_their_cause_also_without_a_price(
    tmp_path: Path, driver: Path
) -> None:
    past_minutes_of_three_sources(tmp_path)
    with agent_of(tmp_path, driver, {"chat": {"model_config": llama(tmp_path)}}) as agent:
        summary, rows = counted(agent, "chat"), agent.api.requests()
        page = agent.api.exposition()
    assert (summary["cost"], {row["cost_usd"] for row in rows}) == (None, {None})
    assert "llm_cost_usd" not in page
    found = summary["efficiency"]
    sources = found["sources"]
    moved = moved_bytes(DECODED + 1)
    assert sources["requests"]["mbu"] == pytest.approx(moved / 60 / H200_BYTES, rel=0.001)
    engine = sources["engine"]
    assert engine["mfu"] == pytest.approx(ENGINE_FLOPS / 60 / H200_FLOPS, rel=0.001)
    engine_bytes = ENGINE_READ + ENGINE_WRITTEN
    assert engine["mbu"] == pytest.approx(engine_bytes / 60 / H200_BYTES, rel=0.001)
    hardware = sources["hardware"]
    assert (hardware["mfu"], hardware["mbu"]) == (
        pytest.approx(TENSOR_ACTIVE * CLOCK_RATIO),
        pytest.approx(MEMORY_ACTIVE),
    )
    disagreements = {(each["higher"], each["lower"]): each for each in found["disagreements"]}
    assert disagreements.keys() == {("hardware", "requests"), ("hardware", "engine")}
    ours = disagreements["hardware", "requests"]
    assert (ours["figure"], ours["cause"]) == ("mbu", "preemptions")
    assert ours["times"] == pytest.approx(MEMORY_ACTIVE / sources["requests"]["mbu"], rel=0.01)
    assert ours["causes"][0] == "preempted requests were computed again"
    for source in ("requests", "engine", "hardware"):
        shown = total(page, "llm_mbu_ratio", source=source, phase="all")
        assert shown == pytest.approx(sources[source]["mbu"], rel=0.01)
    shown = total(page, "llm_efficiency_disagreement_ratio", lower="requests", cause="preemptions")
    assert shown == pytest.approx(ours["times"])


def costs_add_up(cost: Mapping[str, Any], of_request: float) -> None:
    unassigned = cost["idle_usd"] + cost["unknown_usd"] + cost["unseen_usd"]
    assert of_request + unassigned == pytest.approx(cost["bill_usd"])
    assert cost["prefill_usd"] + cost["decode_usd"] == pytest.approx(of_request)
    assert cost["bill_usd"] == pytest.approx(cost["gpu_hours"] * 3.6)
    assert cost["bill_usd"] >= 120 * A_SECOND_USD


# By engine, the content of its model's file, and why it cannot be used.
UNREADABLE = {
    "strange": ('{"model_type": "strange"}', "the model architecture 'strange' is unknown"),
    "text": ("no JSON", "cannot be read as JSON"),
    "missing": (None, "cannot be read as JSON"),
    "pipe": (None, "cannot be read as JSON: Is a named pipe; name a regular file"),
}


def test_unreadable_models_are_reported_and_the_agent_keeps_running(
    tmp_path: Path, driver: Path
) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    engines = {}
    for name, (content, _) in UNREADABLE.items():
        path = tmp_path / f"{name}.json"
        if content is not None:
            path.write_text(content)
        engines[name] = {"model_config": str(path)}
    with agent_of(tmp_path, driver, engines) as agent:
        page = agent.api.exposition()
        summary = agent.api.summary()
        setups = agent.api.items("/api/v1/setup", {"engine": "strange"})
    assert (summary["mfu"], summary["mbu"]) == (None, None)
    steps = {step["name"]: step for step in setups[0]["steps"]}
    assert UNREADABLE["strange"][1] in steps["model config"]["actions"][0]["where"]
    missing = "llm_agent_figures_missing_total"
    for name, (_, message) in UNREADABLE.items():
        assert total(page, missing, engine=name, reason="model_config") == 1
        log = " ".join(agent.log().split())
        start = f"engine {name}: efficiency or cost is unknown or doubtful: "
        assert message in log.partition(start)[2].partition(" ERROR ")[0], name


class Scheduled:
    """Replaces the scheduler, and records which jobs would run at the start."""

    def __init__(self) -> None:
        self.at_once: list[bool] = []

    def every(
        self, _interval_s: float, _name: str, _job: object, *, first_in_s: float | None
    ) -> None:
        """One job."""
        self.at_once.append(first_in_s == 0)


WITHOUT_SOURCE = {"nvml": {"enabled": False}}
SILENT = {"dcgm": {"url": "http://127.0.0.1:9400/metrics"}}


@pytest.mark.parametrize(
    ("source", "gpus", "known", "at_once"),
    [
        (WITHOUT_SOURCE, [], True, False),
        (WITHOUT_SOURCE, [0], True, True),
        (WITHOUT_SOURCE, [], False, True),
        (SILENT, [0], False, False),
        (SILENT, [], False, False),
    ],
)
def test_missed_minutes_wait_until_the_engines_gpus_are_known(
    tmp_path: Path, source: dict[str, Any], gpus: list[int], known: bool, at_once: bool
) -> None:
    """If they were computed earlier, they would never have a bill."""
    engine = {"name": "chat", "url": "http://127.0.0.1:8000", "gpus": gpus}
    configured = Settings.model_validate({"engines": [engine], **source})
    database = open_engine(f"sqlite:///{tmp_path / 'goodput.db'}")
    meter, jobs = Meter([], ["chat"]), Scheduled()
    around = GpuJobs(configured, ObservationStore(database, "agent-0"), meter)
    if known:
        sample = GpuSample(gpu="a", index=0, name="NVIDIA H200", at=NOON, facts={})
        around.inventory.update(GpuSamples((sample,)), NOON)
    efficiency = EfficiencyJobs(configured, MinuteStore(database, "agent-0"), around, meter)
    efficiency.schedule(cast(Jobs, jobs))
    database.dispose()
    assert jobs.at_once == [at_once]
