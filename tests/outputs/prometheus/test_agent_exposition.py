"""The exposition as scrapers read it."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as read_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as read_text

from agent.catalog import engine_facts as facts
from agent.catalog import gpu_facts
from agent.catalog.efficiency_metrics import EFFICIENCY_METRICS
from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.metric import Kind
from agent.catalog.routers import ROUTER_FACTS
from agent.outputs.prometheus.agent_exposition import (
    MODELS_KEPT,
    AgentExposition,
    EfficiencyBoard,
    HostBoard,
    gpu_families,
)
from agent.outputs.prometheus.meter import Meter
from agent.records.engine import (
    CgroupMemory,
    EngineProcess,
    HistogramSnapshot,
    HostSample,
    LogSample,
    ProcessRole,
)
from agent.records.gpu import GpuSample, MigInstance
from agent.records.minute import Ledger, MinuteRow
from agent.settings import Settings
from tests.outputs.prometheus.filled import (
    COUNTERS,
    COUNTS,
    FULL_SAMPLE,
    GAUGES,
    INFO,
    OBJECTIVES,
    OPENMETRICS,
    SAMPLE,
    TEXT,
    count,
    exposition_of,
    filled_meter,
)
from tests.published_metrics import METRICS
from tests.records.making import NOON, record
from tests.records.minutes import UNKNOWN, minute

Read = Callable[[str], Iterable[Any]]
READERS: dict[str, Read] = {TEXT: read_text, OPENMETRICS: read_openmetrics}

each_format = pytest.mark.parametrize("accept", READERS, ids=["text", "openmetrics"])


def samples(meter: Meter, name: str, accept: str = TEXT) -> list[tuple[dict[str, str], float]]:
    return [
        (sample.labels, sample.value)
        for family in READERS[accept](exposition_of(meter, accept))
        for sample in family.samples
        if sample.name == name
    ]


@each_format
def test_every_series_is_as_it_is_declared(accept: str) -> None:
    families = {
        family.name: family for family in READERS[accept](exposition_of(filled_meter(), accept))
    }
    declared = {metric.name: metric for metric in METRICS}
    assert families.keys() <= declared.keys()
    # The fixed state leaves out most engine facts, GPUs, routers and whole minutes.
    omitted = (*facts.ENGINE_FACTS, *GPU_FACTS, *ROUTER_FACTS, *EFFICIENCY_METRICS)
    assert declared.keys() - families.keys() <= {fact.name for fact in omitted}
    of_engines = {fact.name for fact in facts.ENGINE_FACTS}
    shown: dict[tuple[Any, ...], float] = {}
    for name, family in families.items():
        metric = declared[name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        labels = {*metric.labels, *(("engine", "model") if name in of_engines else ())}
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == labels
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in shown
            shown[key] = sample.value
    for metric, values, value in (*GAUGES, *COUNTERS):
        ending = "_total" if metric.kind is Kind.COUNTER else ""
        named = zip(metric.labels, values, strict=True)
        assert shown[(f"{metric.name}{ending}", *sorted(named))] == value, metric.name


def test_openmetrics_has_trace_ids_and_text_has_none() -> None:
    shown = {
        sample.exemplar.labels["trace_id"]
        for family in READERS[OPENMETRICS](exposition_of(filled_meter(), OPENMETRICS))
        for sample in family.samples
        if sample.exemplar
    }
    assert shown == {f"{number:032x}" for number in (1, 2, 3, 4, 5)}
    text = exposition_of(filled_meter())
    assert "trace_id" not in text
    assert " # " not in text.replace("# HELP", "").replace("# TYPE", "")


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        ("text/html,application/xhtml+xml;q=0.9", "text/plain; version=0.0.4"),
        ("text/plain;version=0.0.4", "text/plain; version=0.0.4"),
        ("application/openmetrics-text", "application/openmetrics-text; version=1.0.0"),
        (
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2",
            "application/openmetrics-text; version=1.0.0",
        ),
        ("application/vnd.google.protobuf", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;version=x", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;version=;;,=;q=", "application/openmetrics-text; "),
        ("text/plain;version=9999999999", "text/plain; "),
        (";;;,,,===", "text/plain; version=0.0.4"),
    ],
)
def test_a_scraper_gets_an_accepted_format_or_plain_text(accept: str, content_type: str) -> None:
    body, actual = AgentExposition(filled_meter(), INFO).render(accept)
    assert actual.startswith(content_type)
    assert body


@each_format
def test_hostile_names_are_published_unchanged(accept: str) -> None:
    names = ['quo"te', "back\\slash", "new\nline", "\\n", "größe", "{}", 'a",b="c', "<b>", " "]
    meter = Meter(OBJECTIVES, [])
    count(meter, *[record(number, model=name) for number, name in enumerate(names)])
    published = samples(meter, "llm_input_tokens_total", accept)
    assert {labels["model"]: value for labels, value in published} == dict.fromkeys(names, 100.0)


def test_objectives_are_published_with_their_targets_and_limits() -> None:
    meter = Meter(OBJECTIVES, [])
    targets = {labels["objective"]: of for labels, of in samples(meter, "llm_slo_target_ratio")}
    assert targets == {"chat": 0.95, "long": 0.9}
    limits = {
        (labels["objective"], labels["measure"]): limit_s
        for labels, limit_s in samples(meter, "llm_slo_limit_seconds")
    }
    assert limits == {
        ("chat", "ttft"): 0.2,
        ("chat", "tpot"): 0.12,
        ("long", "ttft"): 0.77,
        ("long", "e2e"): 33.0,
    }


def test_an_engine_s_histograms_bound_how_many_requests_were_within_each_limit() -> None:
    """The limit of 200 ms lies between two edges, that of 120 ms is one."""
    ttft = HistogramSnapshot((0.1, 0.25, inf), (40.0, 70.0, 100.0), 9.0)
    tpot = HistogramSnapshot((0.05, 0.12, inf), (10.0, 60.0, 90.0), 9.0)
    meter = Meter(OBJECTIVES, ["chat-0"])
    histograms = {facts.TIME_TO_FIRST_TOKEN.name: ttft, facts.TIME_PER_OUTPUT_TOKEN.name: tpot}
    meter.sample(replace(SAMPLE, histograms=histograms))
    found = {
        (labels["objective"], labels["measure"], labels["within"]): value
        for labels, value in samples(meter, "llm_slo_engine_requests_total")
    }
    # What engines measure is not told apart by the length of the prompt.
    assert found == {
        ("chat", "ttft", "yes"): 40.0,
        ("chat", "ttft", "perhaps"): 30.0,
        ("chat", "ttft", "no"): 30.0,
        ("chat", "tpot", "yes"): 60.0,
        ("chat", "tpot", "perhaps"): 0.0,
        ("chat", "tpot", "no"): 30.0,
    }


def test_an_objective_of_the_settings_is_told_from_the_preset_and_the_agent_has_its_name() -> None:
    preset, own = Settings().all_objectives(), OBJECTIVES
    assert samples(Meter(preset, []), "llm_slo_configured") == [({"objective": "chat"}, 0.0)]
    assert [value for _, value in samples(Meter(own, []), "llm_slo_configured")] == [1.0, 1.0]
    agent, version, simulated = INFO
    named = {"agent": agent, "version": version, "simulated": simulated}
    assert samples(Meter((), []), "llm_agent_info") == [(named, 1.0)]


# Engines


def engine_facts_of(meter: Meter) -> set[tuple[str, str]]:
    names = {fact.name for fact in facts.ENGINE_FACTS}
    return {
        (family.name, sample.labels["engine"])
        for family in read_text(exposition_of(meter))
        for sample in family.samples
        if family.name in names
    }


def up(meter: Meter) -> dict[str, float]:
    return {labels["engine"]: value for labels, value in samples(meter, "llm_engine_up")}


def test_every_engine_fact_is_published_with_its_own_name_and_labels() -> None:
    meter = Meter((), ["chat-0"])
    meter.sample(FULL_SAMPLE)
    assert engine_facts_of(meter) == {(fact.name, "chat-0") for fact in facts.ENGINE_FACTS}
    for number, fact in enumerate(COUNTS, 1):
        shown = f"{fact.name}_total" if fact.kind is Kind.COUNTER else fact.name
        labels = {"engine": "chat-0", "model": "llama", **dict.fromkeys(fact.labels, "x")}
        assert samples(meter, shown) == [(labels, float(number))]


def test_facts_of_an_engine_that_cannot_be_scraped_are_not_published() -> None:
    meter = Meter((), ["chat-0", "chat-1"])
    assert up(meter) == {"chat-0": 0, "chat-1": 0}
    assert engine_facts_of(meter) == set()
    meter.sample(SAMPLE)
    meter.sample(replace(SAMPLE, engine="chat-1"))
    assert up(meter) == {"chat-0": 1, "chat-1": 1}
    meter.scrape_failed("chat-0", "timeout")
    assert up(meter) == {"chat-0": 0, "chat-1": 1}
    assert {engine for _, engine in engine_facts_of(meter)} == {"chat-1"}
    outcomes = {
        (labels["engine"], labels["outcome"]): value
        for labels, value in samples(meter, "llm_agent_scrapes_total")
        if value
    }
    assert outcomes == {("chat-0", "ok"): 1, ("chat-0", "timeout"): 1, ("chat-1", "ok"): 1}
    meter.sample(replace(SAMPLE, model=None, facts={}, histograms={}))
    assert up(meter) == {"chat-0": 1, "chat-1": 1}
    assert {engine for _, engine in engine_facts_of(meter)} == {"chat-1"}


def test_an_engine_without_a_model_name_has_the_model_unknown() -> None:
    meter = Meter((), ["chat-0"])
    meter.sample(replace(SAMPLE, model=None))
    ((labels, _),) = samples(meter, "llm_engine_requests_running")
    assert labels == {"engine": "chat-0", "model": "unknown"}


def test_facts_of_gpus_and_of_their_instances_have_the_uuid_as_a_label() -> None:
    used, clock = (gpu_facts.MEMORY_USED.name, ()), (gpu_facts.CLOCK.name, ("sm",))
    part = MigInstance(
        uuid="MIG-1",
        name="1g.18gb",
        gpu_instance=1,
        compute_instance=0,
        gpu_slices=1,
        facts={used: 5.0},
    )
    gpu = GpuSample(gpu="GPU-a", index=0, name="H200", at=NOON, facts={used: 3.0, clock: 1.98e9})
    other = replace(gpu, gpu="GPU-b", facts={used: 2.0}, mig_instances=(part,))
    shown = {
        (sample.name, *sample.labels.values()): sample.value
        for family in gpu_families([gpu, other])
        for sample in family.samples
    }
    assert shown == {
        ("gpu_memory_used_bytes", "GPU-a"): 3.0,
        ("gpu_memory_used_bytes", "GPU-b"): 2.0,
        ("gpu_memory_used_bytes", "MIG-1"): 5.0,
        ("gpu_clock_hertz", "GPU-a", "sm"): 1.98e9,
    }


FRONT, CORE = ProcessRole.FRONT, ProcessRole.CORE


def process(pid: int, role: ProcessRole, cpu_s: float) -> EngineProcess:
    return EngineProcess(
        pid=pid, started_after_boot_s=float(pid), role=role, name="p", state="S", cpu_s=cpu_s
    )


def host_sample(*processes: EngineProcess, cgroup: CgroupMemory | None = None) -> HostSample:
    return HostSample(at=0.0, processes=processes, cgroup=cgroup)


def host_values(board: HostBoard) -> dict[tuple[str, ...], float]:
    return {
        (host_sample.name, *host_sample.labels.values()): host_sample.value
        for family in board.families()
        for host_sample in family.samples
    }


def test_cpu_time_is_published_by_role_and_never_falls_when_processes_come_and_go() -> None:
    board = HostBoard()
    board.sample("chat", HostSample(at=0.0, unread={"processes": "elsewhere"}))
    assert host_values(board) == {}
    board.sample("chat", host_sample(process(1, FRONT, 2.0), process(2, FRONT, 7.0)))
    board.sample("chat", host_sample(process(1, FRONT, 3.0), process(3, CORE, 30.0)))
    board.sample("chat", host_sample(process(9, FRONT, 0.5), process(3, CORE, 34.0)))
    assert host_values(board) == {
        ("llm_engine_cpu_seconds_total", "chat", "front"): 10.5,
        ("llm_engine_cpu_seconds_total", "chat", "core"): 34.0,
    }


def test_only_known_memory_values_are_published() -> None:
    board = HostBoard()
    cgroup = CgroupMemory(version=2, path="/e", inode=1, usage_bytes=900, oom_kills=3)
    board.sample("chat", host_sample(cgroup=cgroup))
    assert host_values(board) == {
        ("llm_engine_memory_usage_bytes", "chat"): 900.0,
        ("llm_engine_oom_kills_total", "chat"): 3.0,
    }


def test_the_balance_of_experts_stays_for_five_minutes_after_its_last_line() -> None:
    board, metric = HostBoard(), "llm_engine_expert_balance_ratio"
    board.sample("moe", HostSample(at=0.0, log=LogSample(lines=3, expert_balance=0.75)))
    board.sample("moe", HostSample(at=290.0, log=LogSample(lines=9)))
    assert host_values(board) == {(metric, "moe"): 0.75}
    board.sample("moe", HostSample(at=310.0, log=LogSample(lines=9)))
    assert host_values(board) == {}


Series = dict[tuple[str, ...], float]


def board(*rows: MinuteRow) -> EfficiencyBoard:
    filled = EfficiencyBoard()
    for row in rows:
        filled.add(row, None)
    return filled


def series(of: EfficiencyBoard) -> Series:
    """Return each value by metric name and by the labels after engine and model."""
    return {
        (sample.name, *list(sample.labels.values())[2:]): sample.value
        for family in of.families()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_prefill_and_decode_have_separate_values_with_their_source() -> None:
    values = series(board(minute()))
    assert values["llm_mfu_ratio", "prefill", "requests"] == pytest.approx(0.5)
    assert values["llm_mbu_ratio", "decode", "requests"] == pytest.approx(0.5)
    assert values["llm_mfu_ratio", "all", "requests"] == pytest.approx(650 / 5500), (
        "without 5 s unread"
    )
    assert values["llm_mfu_ratio", "all", "hardware"] == pytest.approx(0.12)
    assert ("llm_mfu_ratio", "all", "engine") not in values


def test_the_roofline_has_the_bound_of_each_phase() -> None:
    values = series(board(minute()))
    assert values["llm_roofline_ridge_flops_per_byte",] == 10
    assert values["llm_roofline_flops_per_byte", "prefill"] == 50
    assert values["llm_roofline_bound", "prefill", "compute-bound"] == 1
    assert values["llm_roofline_bound", "decode", "bandwidth-bound"] == 1
    full = series(board(minute(cache_full_s=40.0)))
    assert full["llm_roofline_bound", "decode", "memory-capacity-bound"] == 1
    assert full["llm_roofline_bound", "prefill", "compute-bound"] == 1


def test_a_disagreement_is_published_with_its_likely_cause_also_with_a_zero() -> None:
    pair = {"higher": "requests", "lower": "hardware", "causes": ["a sentence"]}
    found = (
        {**pair, "figure": "mfu", "times": None, "cause": "slow_clock"},
        # As earlier versions stored them.
        {**pair, "figure": "mbu", "times": 3.0},
    )
    values = series(board(minute(disagreements=found)))
    of, name = ("requests", "hardware"), "llm_efficiency_disagreement_ratio"
    assert values[name, "mfu", *of, "slow_clock"] == inf
    assert values[name, "mbu", *of, "unknown"] == 3.0


def test_all_shares_add_up_to_the_bill() -> None:
    filled = board(minute(0), minute(1))
    assert sum(shares(filled).values()) == pytest.approx(2.0)
    parts = {"prefill": 2 * 0.26, "decode": 2 * 0.34, "aborted": 2 * 0.1}
    assert {part: shares(filled)[part] for part in parts} == pytest.approx(parts)
    assert series(filled)["llm_energy_joules_total",] == 12000


def test_token_prices_are_those_of_the_newest_minute() -> None:
    values = series(board(minute(0), minute(1, good_tokens=50.0)))
    assert values["llm_cost_usd_per_million_tokens", "input"] == pytest.approx(300)
    assert values["llm_cost_usd_per_million_tokens", "computed_input"] == pytest.approx(0.2e6 / 900)
    assert values["llm_cost_usd_per_million_tokens", "cached_input"] == pytest.approx(1000)
    assert values["llm_cost_usd_per_million_tokens", "output"] == pytest.approx(2000)
    assert values["llm_cost_usd_per_million_tokens", "within_objective"] == pytest.approx(20000)
    assert values["llm_cost_usd_per_million_good_tokens", "chat"] == pytest.approx(10000)
    assert values["llm_cost_usd_per_million_good_tokens", "long"] == pytest.approx(20000)
    assert values["llm_cost_usd_per_request",] == pytest.approx(0.1)
    assert values["llm_cost_usd_per_hour",] == pytest.approx(60)
    assert values["llm_energy_joules_per_output_token",] == 30


def test_unknown_values_are_absent() -> None:
    values = series(board(minute(**UNKNOWN)))
    assert {name for name, *_ in values} == {"llm_engine_time_seconds_total"}


def shares(of: EfficiencyBoard) -> dict[str, float]:
    return {name[1]: usd for name, usd in series(of).items() if name[0] == "llm_cost_usd_total"}


def test_a_counter_never_falls_and_reaches_the_right_value() -> None:
    """A late row moves unseen cost to its request; the shares add up to the bill throughout."""
    shown = board(minute(0))
    shown.add(minute(0, unseen_usd=0.02, decode_usd=0.43), minute(0))
    assert shares(shown)["unseen"] == pytest.approx(0.05)
    assert shares(shown)["decode"] == pytest.approx(0.34)
    assert sum(shares(shown).values()) == pytest.approx(1.0)
    shown.add(minute(1, prefill_flops=1000.0), None)
    assert shares(shown)["unseen"] == pytest.approx(0.07)
    assert shares(shown)["decode"] == pytest.approx(0.71)
    assert sum(shares(shown).values()) == pytest.approx(2.0)
    # One that is counted again replaces no newer one.
    shown.add(minute(0), minute(0))
    assert series(shown)["llm_mfu_ratio", "prefill", "requests"] == pytest.approx(1.0)


def test_all_shares_are_the_bill_while_one_is_published_too_high() -> None:
    """The share of aborted requests stays too high, as no later one is aborted."""
    shown = board(minute(0))
    none = {"aborted_usd": 0.0, "aborted_prefill_usd": 0.0}
    shown.add(minute(0, **none), minute(0))
    shown.add(minute(1, **none), None)
    assert shares(shown)["aborted"] == pytest.approx(0.1)
    assert sum(shares(shown).values()) == pytest.approx(2.0)


def test_minutes_from_before_a_restart_add_nothing_when_counted_again() -> None:
    shown = board()
    shown.add(minute(0, unseen_usd=0.02, decode_usd=0.43), minute(0))
    assert sum(shares(shown).values()) == 0
    shown.add(minute(1), None)
    assert sum(shares(shown).values()) == pytest.approx(1.0)


def ledger_minute(number: int, row_tokens: float, *, closed: bool = True) -> MinuteRow:
    """A minute in which an engine counted 100 output tokens and one request."""
    found = Ledger(output_tokens=100.0, requests=1.0, finished=0.0, row_output_tokens=row_tokens)
    return minute(number, ledger=found, ledger_closed=closed)


def test_vanished_work_is_published_when_its_minute_is_closed() -> None:
    filled = board(ledger_minute(0, 60.0, closed=False))
    assert not [key for key in series(filled) if "unaccounted" in key[0]]
    filled.add(ledger_minute(0, 60.0), ledger_minute(0, 60.0, closed=False))
    values = series(filled)
    assert values["llm_unaccounted_output_tokens_total",] == 40
    assert values["llm_unaccounted_requests_total", "aborted"] == 1
    assert values["llm_unaccounted_requests_total", "finished"] == 0
    assert values["llm_unaccounted_cost_usd_total",] == pytest.approx(0.05)
    assert ("llm_unaccounted_input_tokens_total",) not in values


def test_a_row_that_comes_late_holds_the_counter_of_vanished_tokens_back() -> None:
    filled = board(ledger_minute(0, 60.0))
    filled.add(ledger_minute(0, 90.0), ledger_minute(0, 60.0))
    assert series(filled)["llm_unaccounted_output_tokens_total",] == 40
    filled.add(ledger_minute(1, 80.0), None)
    assert series(filled)["llm_unaccounted_output_tokens_total",] == 40
    filled.add(ledger_minute(2, 50.0), None)
    assert series(filled)["llm_unaccounted_output_tokens_total",] == 80


def models(of: EfficiencyBoard) -> set[str]:
    return {
        sample.labels["model"]
        for family in of.families()
        if family.type == "counter"
        for sample in family.samples
    }


def test_an_engine_keeps_the_counters_of_its_last_models_of_a_day() -> None:
    changing = board(*(minute(number, model=f"name-{number}") for number in range(604)))
    assert models(changing) == {f"name-{number}" for number in range(604 - MODELS_KEPT, 604)}
    changing.add(minute(604 + 24 * 60), None)
    assert models(changing) == {"llama"}
