"""Comparison of the agent's samples with the values of nvidia-smi between them."""

import csv
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agent.catalog import gpu_facts as f
from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.metric import Metric
from agent.records.gpu import GpuSample

MIB = 2**20
MICROSECOND_S = 1e-6

SAME, BOTH_UNKNOWN, NOT_KNOWN = "same", "unknown to both", "not known to this nvidia-smi"
GOOD = frozenset({SAME, BOTH_UNKNOWN, NOT_KNOWN})
# A load that changes between the three reads agrees in another try.
TRIES = 5

Rows = dict[str, dict[str, str]]
_WORDS = {
    **dict.fromkeys(("Active", "Enabled", "Yes"), 1.0),
    **dict.fromkeys(("Not Active", "Disabled", "No"), 0.0),
}
_UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field to query')


@dataclass(frozen=True, slots=True)
class Check:
    """A query of nvidia-smi, and the agent's fact, which is compared in `unit`.

    The value must be between the agent's samples before and after, or at most `apart` from them.
    """

    query: str
    fact: Metric
    labels: tuple[str, ...] = ()
    unit: float = 1.0
    apart: float = 0.0

    def verdict(self, value: str, before: GpuSample, after: GpuSample) -> str:
        """One of GOOD, or both numbers."""
        if value == NOT_KNOWN:
            return NOT_KNOWN
        read = (sample.fact(self.fact.name, *self.labels) for sample in (before, after))
        ours = [each / self.unit for each in read if each is not None]
        theirs = _number(value)
        if not ours and theirs is None:
            return BOTH_UNKNOWN
        if not ours or theirs is None:
            return f"agent {ours[-1] if ours else None}, nvidia-smi {value}"
        same = min(ours) - self.apart <= theirs <= max(ours) + self.apart
        return SAME if same else f"agent {ours[-1]:.10g}, nvidia-smi {theirs:.10g}"


def _number(value: str) -> float | None:
    try:
        return _WORDS[value] if value in _WORDS else float(value)
    except ValueError:
        return None


def _active(query: str, reason: str) -> Check:
    return Check(f"clocks_event_reasons.{query}", f.THROTTLE_ACTIVE, (reason,))


def _timed(query: str, reason: str) -> Check:
    query = f"clocks_event_reasons_counters.{query}"
    return Check(query, f.THROTTLED_TIME, (reason,), unit=MICROSECOND_S, apart=1)


def _ecc(severity: str, counter: str, since: str) -> Check:
    return Check(f"ecc.errors.{severity}.{counter}.total", f.ECC_ERRORS, (severity, since))


# Some values are rounded, and some are measured again at each query.
CHECKS = (
    Check("memory.total", f.MEMORY_TOTAL, unit=MIB, apart=1),
    Check("memory.reserved", f.MEMORY_RESERVED, unit=MIB, apart=1),
    Check("memory.used", f.MEMORY_USED, unit=MIB, apart=1),
    Check("memory.free", f.MEMORY_FREE, unit=MIB, apart=1),
    Check("power.draw", f.POWER, apart=5),
    Check("power.draw.instant", f.POWER_INSTANT, apart=10),
    Check("enforced.power.limit", f.POWER_LIMIT, apart=0.5),
    Check("temperature.gpu", f.TEMPERATURE, ("gpu",), apart=1),
    Check("temperature.memory", f.TEMPERATURE, ("memory",), apart=1),
    Check("clocks.sm", f.CLOCK, ("sm",), unit=1e6, apart=15),
    Check("clocks.mem", f.CLOCK, ("memory",), unit=1e6),
    Check("clocks.max.sm", f.CLOCK_MAX, ("sm",), unit=1e6),
    Check("clocks.max.mem", f.CLOCK_MAX, ("memory",), unit=1e6),
    Check("utilization.gpu", f.UTILIZATION, unit=0.01, apart=2),
    Check("utilization.memory", f.MEMORY_BUSY, unit=0.01, apart=2),
    _active("gpu_idle", "idle"),
    _active("applications_clocks_setting", "application_clocks"),
    _active("sw_power_cap", "sw_power_cap"),
    _active("hw_slowdown", "hw_slowdown"),
    _active("sync_boost", "sync_boost"),
    _active("sw_thermal_slowdown", "sw_thermal"),
    _active("hw_thermal_slowdown", "hw_thermal"),
    _active("hw_power_brake_slowdown", "hw_power_brake"),
    _timed("sw_power_cap", "sw_power_cap"),
    _timed("sync_boost", "sync_boost"),
    _timed("sw_thermal_slowdown", "sw_thermal"),
    _timed("hw_thermal_slowdown", "hw_thermal"),
    _timed("hw_power_brake_slowdown", "hw_power_brake"),
    Check("ecc.mode.current", f.ECC_ENABLED),
    _ecc("corrected", "volatile", "driver_load"),
    _ecc("uncorrected", "volatile", "driver_load"),
    _ecc("corrected", "aggregate", "lifetime"),
    _ecc("uncorrected", "aggregate", "lifetime"),
    Check("retired_pages.single_bit_ecc.count", f.RETIRED_PAGES, ("corrected",)),
    Check("retired_pages.double_bit.count", f.RETIRED_PAGES, ("uncorrected",)),
    Check("retired_pages.pending", f.PAGE_RETIREMENT_PENDING),
)
ROW_CHECKS = (
    Check("remapped_rows.correctable", f.REMAPPED_ROWS, ("corrected",)),
    Check("remapped_rows.uncorrectable", f.REMAPPED_ROWS, ("uncorrected",)),
    Check("remapped_rows.pending", f.ROW_REMAP_PENDING),
    Check("remapped_rows.failure", f.ROW_REMAP_FAILED),
)


class NvidiaSmiFailed(Exception):
    """nvidia-smi failed; the text says how."""


@dataclass(frozen=True, slots=True)
class SmiSample:
    """The values of nvidia-smi at one time: its rows by GPU, and processes as (GPU, process id)."""

    gpus: Rows
    processes: frozenset[tuple[str, int]]


def read_nvidia_smi() -> SmiSample:
    """The values of nvidia-smi now. Raises NvidiaSmiFailed."""
    identity = ("uuid", "name", "index", "driver_version", "mig.mode.current")
    gpus = {row["uuid"]: row for row in _rows("gpu", (*identity, *_queries(CHECKS)))}
    for row in _rows("remapped-rows", ("gpu_uuid", *_queries(ROW_CHECKS))):
        gpus.setdefault(row["gpu_uuid"], {}).update(row)
    programs = _rows("compute-apps", ("gpu_uuid", "pid"))
    return SmiSample(gpus, frozenset((row["gpu_uuid"], int(row["pid"])) for row in programs))


def _queries(checks: Sequence[Check]) -> list[str]:
    return [check.query for check in checks]


def _rows(table: str, queries: Sequence[str]) -> list[dict[str, str]]:
    """The rows of one table of nvidia-smi; a query that it does not know is NOT_KNOWN."""
    known = list(queries)
    while True:
        done = _run(f"--query-{table}={','.join(known)}", "--format=csv,noheader,nounits")
        refused = _UNKNOWN_FIELD.search(done.stdout + done.stderr)
        if refused is None or refused[1] not in known:
            break
        known.remove(refused[1])
    if done.returncode:
        raise NvidiaSmiFailed(f"nvidia-smi ended with {done.returncode}: {done.stdout[-500:]}")
    rows = list(csv.reader(done.stdout.splitlines(), skipinitialspace=True))
    if any(len(row) != len(known) for row in rows):
        raise NvidiaSmiFailed(f"nvidia-smi returned no table of {table}: {done.stdout[-500:]!r}")
    return [dict.fromkeys(queries, NOT_KNOWN) | dict(zip(known, row, strict=True)) for row in rows]


def _run(*words: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NvidiaSmiFailed(f"nvidia-smi cannot be run: {error}") from error


Samples = Mapping[str, GpuSample]


def compare(before: Samples, smi: SmiSample, after: Samples) -> Rows:
    """The verdict on each GPU that either saw, by UUID and query."""
    return {
        gpu: dict(_verdicts(gpu, before, smi, after))
        for gpu in sorted(before.keys() | after.keys() | smi.gpus.keys())
    }


def _verdicts(
    gpu: str, before: Samples, smi: SmiSample, after: Samples
) -> Iterator[tuple[str, str]]:
    row = smi.gpus.get(gpu)
    if gpu not in after or gpu not in before or row is None:
        yield "uuid", f"seen only by {'agent' if row is None else 'nvidia-smi'}"
        return
    earlier, later = before[gpu], after[gpu]
    same = (later.name, str(later.index)) == (row["name"], row["index"])
    yield "name and index", SAME if same else f"agent {later.name}, {later.index}"
    for check in (*CHECKS, *ROW_CHECKS):
        yield check.query, check.verdict(row.get(check.query, NOT_KNOWN), earlier, later)
    mode = row["mig.mode.current"]
    # MIG may be on without an instance.
    divided = not later.mig_instances or mode == "Enabled"
    yield "mig.mode.current", SAME if divided else f"agent Enabled, nvidia-smi {mode}"
    yield "processes", _processes(gpu, smi, earlier, later)


def _processes(gpu: str, smi: SmiSample, before: GpuSample, after: GpuSample) -> str:
    theirs = {pid for on, pid in smi.processes if on == gpu}
    ours = [_pids(before), _pids(after)]
    if theirs in ours:
        return SAME
    if ours[1] is None:
        return BOTH_UNKNOWN if not theirs else f"agent None, nvidia-smi {sorted(theirs)}"
    return f"agent {sorted(ours[1])}, nvidia-smi {sorted(theirs)}"


def _pids(sample: GpuSample) -> set[int] | None:
    return None if sample.processes is None else set(sample.processes)


def compare_until_they_agree(read: Callable[[], Samples], pause: Callable[[], None]) -> Rows:
    """The verdicts, each the best of some tries. Raises NvidiaSmiFailed."""
    verdicts: Rows = {}
    for _ in range(TRIES):
        before, smi, after = read(), read_nvidia_smi(), read()
        for gpu, row in compare(before, smi, after).items():
            known = verdicts.setdefault(gpu, {})
            known |= {query: new for query, new in row.items() if known.get(query) not in GOOD}
        if agreed(verdicts):
            break
        pause()
    return verdicts


def agreed(verdicts: Rows) -> bool:
    """Whether nothing differs, on at least one GPU."""
    return bool(verdicts) and all(GOOD.issuperset(gpu.values()) for gpu in verdicts.values())


def unchecked() -> list[str]:
    """The facts that no check compares."""
    checked = {check.fact.name for check in (*CHECKS, *ROW_CHECKS)}
    return [fact.name for fact in GPU_FACTS if fact.name not in checked]
