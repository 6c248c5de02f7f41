"""The published values of GPUs, hosts and efficiency; unknown values are absent."""

from math import inf
from typing import Any

import pytest

from agent.catalog import gpu_facts as facts
from agent.outputs.prometheus.boards import MODELS_KEPT, EfficiencyBoard, HostBoard, gpu_families
from agent.records.gpu import GpuSample, MigInstance
from agent.records.host import CgroupMemory, EngineProcess, HostSample, ProcessRole
from agent.records.minute import Ledger, MinuteRow
from tests.records.making import NOON
from tests.records.minutes import UNKNOWN, minute

GpuSeries = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def gpu_sample(gpu: str, used_bytes: float, *instances: MigInstance) -> GpuSample:
    values = {(facts.MEMORY_USED.name, ()): used_bytes, (facts.CLOCK.name, ("sm",)): 1.98e9}
    return GpuSample(
        gpu=gpu, index=0, name="NVIDIA H200", at=NOON, facts=values, mig_instances=instances
    )


def gpu_series(*samples: GpuSample) -> GpuSeries:
    return {
        (shown.name, tuple(shown.labels.items())): shown.value
        for family in gpu_families(samples)
        for shown in family.samples
    }


def test_every_fact_has_the_gpu_as_a_label() -> None:
    shown = gpu_series(gpu_sample("GPU-a", 3.0), gpu_sample("GPU-b", 2.0))
    assert shown["gpu_memory_used_bytes", (("gpu", "GPU-a"),)] == 3.0
    assert shown["gpu_memory_used_bytes", (("gpu", "GPU-b"),)] == 2.0
    assert shown["gpu_clock_hertz", (("gpu", "GPU-a"), ("clock", "sm"))] == 1.98e9


def test_a_mig_instance_has_its_own_uuid() -> None:
    instance = MigInstance(
        uuid="MIG-1",
        name="1g.18gb",
        gpu_instance=1,
        compute_instance=0,
        gpu_slices=1,
        facts={(facts.MEMORY_USED.name, ()): 5.0},
    )
    shown = gpu_series(gpu_sample("GPU-a", 1.0, instance))
    assert shown["gpu_memory_used_bytes", (("gpu", "MIG-1"),)] == 5.0


def test_a_fact_that_no_gpu_reports_is_not_on_the_exposition() -> None:
    assert gpu_series() == {}
    shown = gpu_series(gpu_sample("GPU-a", 1.0))
    assert {name for name, _ in shown} == {"gpu_memory_used_bytes", "gpu_clock_hertz"}


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


def test_cpu_time_is_published_by_role() -> None:
    board = HostBoard()
    board.sample("chat", host_sample(process(1, FRONT, 2.0), process(2, CORE, 30.0)))
    board.sample("chat", host_sample(process(1, FRONT, 2.5), process(2, CORE, 34.0)))
    assert host_values(board) == {
        ("llm_engine_cpu_seconds_total", "chat", "front"): 2.5,
        ("llm_engine_cpu_seconds_total", "chat", "core"): 34.0,
    }


def test_cpu_time_never_falls_when_processes_come_and_go() -> None:
    board = HostBoard()
    board.sample("chat", host_sample(process(1, FRONT, 2.0), process(2, FRONT, 7.0)))
    board.sample("chat", host_sample(process(1, FRONT, 3.0)))
    board.sample("chat", host_sample(process(9, FRONT, 0.5)))
    assert host_values(board)["llm_engine_cpu_seconds_total", "chat", "front"] == 10.5


def test_only_known_memory_values_are_published() -> None:
    board = HostBoard()
    cgroup = CgroupMemory(version=2, path="/e", inode=1, usage_bytes=900, oom_kills=3)
    board.sample("chat", host_sample(cgroup=cgroup))
    assert host_values(board) == {
        ("llm_engine_memory_usage_bytes", "chat"): 900.0,
        ("llm_engine_oom_kills_total", "chat"): 3.0,
    }


def test_a_host_without_known_values_publishes_nothing() -> None:
    board = HostBoard()
    board.sample("chat", HostSample(at=0.0, unread={"processes": "elsewhere"}))
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


def disagreement(times: float | None, **given: str) -> dict[str, Any]:
    values = {"figure": "mfu", "higher": "requests", "lower": "hardware", "causes": ["a sentence"]}
    return {**values, "times": times, **given}


def test_a_disagreement_is_published_with_its_likely_cause() -> None:
    found = (disagreement(2.5, cause="slow_clock"), disagreement(3.0, figure="mbu"))
    values = series(board(minute(disagreements=found)))
    of = ("requests", "hardware")
    name = "llm_efficiency_disagreement_ratio"
    assert values[name, "mfu", *of, "slow_clock"] == 2.5
    assert values[name, "mbu", *of, "unknown"] == 3.0, "as earlier versions stored them"


def test_a_disagreement_with_a_zero_is_infinite() -> None:
    found = disagreement(None, cause="counters_stand_still")
    values = series(board(minute(disagreements=(found,))))
    labels = ("mfu", "requests", "hardware", "counters_stand_still")
    assert values["llm_efficiency_disagreement_ratio", *labels] == inf


def test_all_shares_add_up_to_the_bill() -> None:
    values = series(board(minute(0), minute(1)))
    shares = {name[1]: usd for name, usd in values.items() if name[0] == "llm_cost_usd_total"}
    assert sum(shares.values()) == pytest.approx(2.0)
    assert shares["prefill"] == pytest.approx(2 * 0.26)
    assert shares["decode"] == pytest.approx(2 * 0.34)
    assert shares["aborted"] == pytest.approx(2 * 0.1)
    assert values["llm_energy_joules_total",] == 12000


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


def test_a_counter_never_falls_and_reaches_the_right_value() -> None:
    """A late row moves unseen cost to its request; the shares add up to the bill throughout."""
    shown = board(minute(0))
    again = minute(0, unseen_usd=0.02, decode_usd=0.43)
    shown.add(again, minute(0))
    values = series(shown)
    assert values["llm_cost_usd_total", "unseen"] == pytest.approx(0.05)
    assert values["llm_cost_usd_total", "decode"] == pytest.approx(0.34)
    assert whole_bill(values) == pytest.approx(1.0)
    shown.add(minute(1), None)
    values = series(shown)
    assert values["llm_cost_usd_total", "unseen"] == pytest.approx(0.07)
    assert values["llm_cost_usd_total", "decode"] == pytest.approx(0.71)
    assert whole_bill(values) == pytest.approx(2.0)


def whole_bill(values: Series) -> float:
    return sum(usd for name, usd in values.items() if name[0] == "llm_cost_usd_total")


def test_all_shares_are_the_bill_while_one_is_published_too_high() -> None:
    """The share of aborted requests stays too high, as no later one is aborted."""
    shown = board(minute(0))
    none = {"aborted_usd": 0.0, "aborted_prefill_usd": 0.0}
    shown.add(minute(0, **none), minute(0))
    shown.add(minute(1, **none), None)
    values = series(shown)
    assert values["llm_cost_usd_total", "aborted"] == pytest.approx(0.1)
    assert whole_bill(values) == pytest.approx(2.0)


def test_minutes_from_before_a_restart_add_nothing_when_counted_again() -> None:
    shown = board()
    shown.add(minute(0, unseen_usd=0.02, decode_usd=0.43), minute(0))
    assert whole_bill(series(shown)) == 0
    shown.add(minute(1), None)
    assert whole_bill(series(shown)) == pytest.approx(1.0)


def test_an_old_minute_counted_again_does_not_replace_the_newest() -> None:
    shown = board(minute(0), minute(1, prefill_flops=1000.0))
    shown.add(minute(0), minute(0))
    assert series(shown)["llm_mfu_ratio", "prefill", "requests"] == pytest.approx(1.0)


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
    """The models with counters."""
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
