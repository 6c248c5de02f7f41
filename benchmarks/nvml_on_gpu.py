"""On a machine with GPUs: read everything for a while, check it, and tell what each call costs.

    python -m benchmarks.nvml_on_gpu [--seconds 60] [--interval 1] [--output FILE]

What the agent reads then is checked against `nvidia-smi`, asked in between. The exit code is 0
where both agree. FILE gets all of it as JSON, with the date.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agent.catalog import gpu_facts as f
from agent.catalog.gpu_facts import GPU_FACTS
from agent.records.gpu import GpuSample, XidSeen
from agent.sources.nvml.watch import NvmlSinks, NvmlWatch
from benchmarks.nvml import CallTimes, high, median
from benchmarks.nvml_checks import NvidiaSmiFailed, agreed, compare_until_they_agree, unchecked


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


def read(watch: NvmlWatch, readings: Readings, seconds: float, interval_s: float) -> None:
    """Poll at the interval for so long, as the agent would."""
    watch.poll(time.time())
    began, began_cpu_s = time.monotonic(), time.process_time()
    while (passed_s := time.monotonic() - began) < seconds:
        time.sleep(interval_s - passed_s % interval_s)
        asked = time.monotonic()
        watch.poll(time.time())
        readings.poll_s.append(time.monotonic() - asked)
    readings.cpu_share = (time.process_time() - began_cpu_s) / (time.monotonic() - began)


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


def lines(readings: Readings) -> Iterator[str]:
    """The report for people, but for the calls and what nvidia-smi says."""
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
    yield from (f"Xid {xid.xid} of {xid.gpu}" for xid in readings.xids)


def record(readings: Readings, times: CallTimes) -> dict[str, Any]:
    """All that was read, for a file."""
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
        "call_s": {
            name: {"calls": len(taken_s), "median": median(taken_s), "p99": high(taken_s)}
            for name, taken_s in times.taken_s.items()
        },
    }


def _flat(sample: GpuSample) -> dict[str, float]:
    return {"/".join((name, *labels)): value for (name, labels), value in sample.facts.items()}


def _positive(word: str) -> float:
    number = float(word)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{word} is no time; write seconds above 0")
    return number


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 where the agent and nvidia-smi agree."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nvml_on_gpu")
    parser.add_argument("--seconds", type=_positive, default=60.0)
    parser.add_argument("--interval", type=_positive, default=1.0)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args(arguments)
    times, readings = CallTimes(), Readings()
    sinks = NvmlSinks(readings.sample, readings.xids.append, readings.failures.append)
    watch = NvmlWatch(sinks=sinks, timeout_s=60)
    with times.measuring():
        read(watch, readings, asked.seconds, asked.interval)
    print(*lines(readings), "cost of each call:", *times.lines(), sep="\n")
    kept = record(readings, times)
    # Before nvidia-smi is asked, which may go wrong in ways of its own.
    _keep(asked.output, kept)
    try:
        agree = _checked(watch, readings, asked.interval, kept)
    except NvidiaSmiFailed as failed:
        print(f"NOT CHECKED: {failed}")
        agree = False
    watch.close()
    _keep(asked.output, kept)
    return 0 if agree else 1


def _keep(output: Path | None, kept: dict[str, Any]) -> None:
    if output:
        output.write_text(json.dumps(kept, indent=1))


def _checked(watch: NvmlWatch, readings: Readings, interval_s: float, kept: dict[str, Any]) -> bool:
    """Whether nvidia-smi agrees. Raises NvidiaSmiFailed."""

    def now() -> dict[str, GpuSample]:
        watch.poll(time.time())
        return dict(readings.last)

    verdicts = compare_until_they_agree(now, lambda: time.sleep(interval_s))
    kept["verdicts"] = verdicts
    for gpu, row in verdicts.items():
        print(*(f"  {gpu} {query}: {verdict}" for query, verdict in row.items()), sep="\n")
    print(f"not checked, for nvidia-smi does not tell them so: {', '.join(unchecked())}")
    print("the agent and nvidia-smi agree" if agreed(verdicts) else "THEY DIFFER")
    return agreed(verdicts)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
