"""On a machine with GPUs: read everything for a while, check it, and tell what each call costs.

    python -m benchmarks.nvml_on_gpu [--seconds 60] [--interval 1] [--output FILE]

What the agent read last is checked against `nvidia-smi`, asked just after. The exit code is 0 where
both agree. FILE gets all of it as JSON, with the date.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agent.catalog import gpu_facts as f
from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.metric import Metric
from agent.records.gpu import GpuSample, XidSeen
from agent.sources.nvml.watch import NvmlSinks, NvmlWatch
from benchmarks.nvml import CallTimes, high, median

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Check:
    """A number of nvidia-smi's, the agent's fact, and how far apart they may lie in its unit."""

    query: str
    fact: Metric
    labels: tuple[str, ...] = ()
    unit: float = 1.0
    apart: float = 0.0

    def verdict(self, told: str, sample: GpuSample) -> str:
        """`same`, `unknown to both`, or both numbers."""
        ours = sample.fact(self.fact.name, *self.labels)
        theirs = _number(told)
        if ours is None and theirs is None:
            return "unknown to both"
        if ours is None or theirs is None:
            return f"agent {ours}, nvidia-smi {told}"
        same = abs(ours / self.unit - theirs) <= self.apart
        return "same" if same else f"agent {ours / self.unit:g}, nvidia-smi {theirs:g}"


# What moves may have moved between the two readings.
CHECKS = (
    Check("memory.total", f.MEMORY_TOTAL, unit=MIB, apart=1),
    Check("memory.reserved", f.MEMORY_RESERVED, unit=MIB, apart=1),
    Check("memory.used", f.MEMORY_USED, unit=MIB, apart=256),
    Check("memory.free", f.MEMORY_FREE, unit=MIB, apart=256),
    Check("power.draw", f.POWER, apart=60),
    Check("enforced.power.limit", f.POWER_LIMIT, apart=0.5),
    Check("temperature.gpu", f.TEMPERATURE, ("gpu",), apart=5),
    Check("temperature.memory", f.TEMPERATURE, ("memory",), apart=5),
    Check("clocks.sm", f.CLOCK, ("sm",), unit=1e6, apart=200),
    Check("clocks.mem", f.CLOCK, ("memory",), unit=1e6, apart=200),
    Check("clocks.max.sm", f.CLOCK_MAX, ("sm",), unit=1e6),
    Check("clocks.max.mem", f.CLOCK_MAX, ("memory",), unit=1e6),
    Check("utilization.gpu", f.UTILIZATION, unit=0.01, apart=30),
    Check("utilization.memory", f.MEMORY_BUSY, unit=0.01, apart=30),
    Check(
        "ecc.errors.corrected.volatile.total", f.ECC_ERRORS, ("corrected", "driver_load"), apart=1
    ),
    Check("ecc.errors.uncorrected.volatile.total", f.ECC_ERRORS, ("uncorrected", "driver_load")),
)


def _number(told: str) -> float | None:
    try:
        return float(told)
    except ValueError:
        return None


@dataclass(slots=True)
class Readings:
    """What the watch told."""

    first: dict[str, GpuSample] = field(default_factory=dict)
    last: dict[str, GpuSample] = field(default_factory=dict)
    xids: list[XidSeen] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    poll_s: list[float] = field(default_factory=list)
    cpu_share: float = 0.0

    def sample(self, sample: GpuSample) -> None:
        """Keep the first and the last of each GPU."""
        self.first.setdefault(sample.gpu, sample)
        self.last[sample.gpu] = sample


def read(seconds: float, interval_s: float) -> Readings:
    """Poll at the interval for so long, as the agent would."""
    readings = Readings()
    sinks = NvmlSinks(readings.sample, readings.xids.append, readings.failures.append)
    watch = NvmlWatch(sinks=sinks, timeout_s=60)
    watch.poll(time.time())
    began, began_cpu_s = time.monotonic(), time.process_time()
    while (passed_s := time.monotonic() - began) < seconds:
        time.sleep(interval_s - passed_s % interval_s)
        asked = time.monotonic()
        watch.poll(time.time())
        readings.poll_s.append(time.monotonic() - asked)
    readings.cpu_share = (time.process_time() - began_cpu_s) / (time.monotonic() - began)
    watch.close()
    return readings


def ask_nvidia_smi() -> dict[str, dict[str, str]]:
    """What nvidia-smi says now, by UUID and query."""
    queries = ["uuid", "name", "index", "driver_version", *(check.query for check in CHECKS)]
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(queries)}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return {row[0]: dict(zip(queries, row, strict=True)) for row in rows}


def compare(readings: Readings, told: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The verdict on each GPU that either saw, by UUID and query."""
    verdicts = {}
    for gpu in sorted(readings.last.keys() | told.keys()):
        sample, row = readings.last.get(gpu), told.get(gpu)
        if sample is None or row is None:
            verdicts[gpu] = {"uuid": f"seen only by {'nvidia-smi' if sample is None else 'agent'}"}
            continue
        who = (sample.name, str(sample.index)) == (row["name"], row["index"])
        verdicts[gpu] = {
            "name and index": "same" if who else f"agent {sample.name}, {sample.index}",
            **{check.query: check.verdict(row[check.query], sample) for check in CHECKS},
        }
    return verdicts


def agreed(verdicts: dict[str, dict[str, str]]) -> bool:
    """Whether nothing differs, on at least one GPU."""
    good = {"same", "unknown to both"}
    return bool(verdicts) and all(set(gpu.values()) <= good for gpu in verdicts.values())


def unknown_facts(sample: GpuSample) -> list[str]:
    """The facts of the catalogue that this GPU does not tell."""
    told = {name for name, _ in sample.facts}
    return [fact.name for fact in GPU_FACTS if fact.name not in told]


def energy_line(first: GpuSample, last: GpuSample) -> str:
    """Mean power by the energy counter, beside the last reading of power."""
    joules = [sample.fact(f.ENERGY.name) for sample in (first, last)]
    if None in joules or last.at <= first.at:
        return "mean power by the energy counter: unknown"
    watts = ((joules[1] or 0) - (joules[0] or 0)) / (last.at - first.at)
    return f"mean power by the energy counter: {watts:.1f} W, power {last.fact(f.POWER.name)} W"


def lines(readings: Readings, verdicts: dict[str, dict[str, str]]) -> Iterator[str]:
    """The report for people, but for the calls."""
    yield f"user id {os.getuid()}, {len(readings.poll_s)} polls, failures {readings.failures}"
    yield f"CPU: {100 * readings.cpu_share:.3f} % of a core over all threads"
    yield (
        f"a poll: median {1000 * median(readings.poll_s):.2f} ms, "
        f"p99 {1000 * high(readings.poll_s):.2f} ms, longest {1000 * max(readings.poll_s):.2f} ms"
    )
    for gpu, last in readings.last.items():
        yield f"{gpu} {last.name} (index {last.index}): {len(last.facts)} facts"
        yield f"  {energy_line(readings.first[gpu], last)}"
        yield f"  not told: {', '.join(unknown_facts(last)) or 'nothing'}"
    for gpu, row in verdicts.items():
        yield from (f"  {gpu} {query}: {verdict}" for query, verdict in row.items())
    yield from (f"Xid {xid.xid} of {xid.gpu}" for xid in readings.xids)


def record(
    readings: Readings,
    told: dict[str, dict[str, str]],
    verdicts: dict[str, dict[str, str]],
    times: CallTimes,
) -> dict[str, Any]:
    """All of it, for a file."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "user_id": os.getuid(),
        "cpu_share": readings.cpu_share,
        "poll_s": readings.poll_s,
        "failures": readings.failures,
        "xids": [asdict(xid) for xid in readings.xids],
        "samples": [
            {**asdict(sample), "facts": _flat(sample), "mig_instances": len(sample.mig_instances)}
            for sample in readings.last.values()
        ],
        "nvidia_smi": told,
        "verdicts": verdicts,
        "call_s": {
            name: {"calls": len(taken_s), "median": median(taken_s), "p99": high(taken_s)}
            for name, taken_s in times.taken_s.items()
        },
    }


def _flat(sample: GpuSample) -> dict[str, float]:
    return {"/".join((name, *labels)): value for (name, labels), value in sample.facts.items()}


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 where the agent and nvidia-smi agree."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nvml_on_gpu")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args(arguments)
    times = CallTimes()
    with times.measuring():
        readings = read(asked.seconds, asked.interval)
    told = ask_nvidia_smi()
    verdicts = compare(readings, told)
    print(*lines(readings, verdicts), "cost of each call:", *times.lines(), sep="\n")
    if asked.output:
        asked.output.write_text(json.dumps(record(readings, told, verdicts, times), indent=1))
    print("the agent and nvidia-smi agree" if agreed(verdicts) else "THEY DIFFER")
    return 0 if agreed(verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
