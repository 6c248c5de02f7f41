"""On a machine with GPUs: read everything for a while, check it, and print what each call costs.

    python -m benchmarks.nvml_on_gpu [--seconds 60] [--interval 1] [--output FILE]

The samples are checked against `nvidia-smi`, which is run between two reads. The exit code is 0
where both agree. FILE gets the samples as JSON, with the date.
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
from agent.records.gpu import GpuSample, XidError
from agent.sources.nvml.source import NvmlSource
from benchmarks.nvml import CallTimes, high, median
from benchmarks.nvml_checks import NvidiaSmiFailed, agreed, compare_until_they_agree, unchecked


@dataclass(slots=True)
class NvmlRun:
    """All reads of one source."""

    source: NvmlSource

    first: dict[str, GpuSample] = field(default_factory=dict)
    last: dict[str, GpuSample] = field(default_factory=dict)
    xids: list[XidError] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    poll_s: list[float] = field(default_factory=list)
    cpu_share: float = 0.0

    def read(self) -> None:
        """Read once; of each GPU the first and the last sample stay."""
        read = self.source.read(time.time())
        for sample in read.samples:
            self.first.setdefault(sample.gpu, sample)
            self.last[sample.gpu] = sample
        self.xids += read.xids
        self.failures += read.failures

    def read_for(self, seconds: float, interval_s: float) -> None:
        """Read at the interval for so long, as the agent would."""
        self.read()
        began, began_cpu_s = time.monotonic(), time.process_time()
        while (passed_s := time.monotonic() - began) < seconds:
            time.sleep(interval_s - passed_s % interval_s)
            read_from = time.monotonic()
            self.read()
            self.poll_s.append(time.monotonic() - read_from)
        self.cpu_share = (time.process_time() - began_cpu_s) / (time.monotonic() - began)


def unknown_facts(sample: GpuSample) -> list[str]:
    """The facts of the catalogue that this GPU does not report."""
    reported = {name for name, _ in sample.facts}
    return [fact.name for fact in GPU_FACTS if fact.name not in reported]


def energy_line(first: GpuSample, last: GpuSample) -> str:
    """Mean power by the energy counter, beside the last sample of power."""
    joules = [sample.fact(f.ENERGY.name) for sample in (first, last)]
    if None in joules or last.at <= first.at:
        return "mean power by the energy counter: unknown"
    watts = ((joules[1] or 0) - (joules[0] or 0)) / (last.at - first.at)
    return f"mean power by the energy counter: {watts:.1f} W, power {last.fact(f.POWER.name)} W"


def lines(run: NvmlRun) -> Iterator[str]:
    """The report for people, without the calls and the comparison with nvidia-smi."""
    yield f"user id {os.getuid()}, {len(run.poll_s)} polls, failures {run.failures}"
    yield f"CPU: {100 * run.cpu_share:.3f} % of a core over all threads"
    yield (
        f"a poll: median {1000 * median(run.poll_s):.2f} ms, "
        f"p99 {1000 * high(run.poll_s):.2f} ms, longest {1000 * max(run.poll_s):.2f} ms"
    )
    for gpu, last in run.last.items():
        yield f"{gpu} {last.name} (index {last.index}): {len(last.facts)} facts"
        yield f"  {energy_line(run.first[gpu], last)}"
        yield f"  not reported: {', '.join(unknown_facts(last)) or 'nothing'}"
    yield from (f"Xid {xid.xid} of {xid.gpu}" for xid in run.xids)


def record(run: NvmlRun, times: CallTimes) -> dict[str, Any]:
    """The samples and the calls, for a file."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "user_id": os.getuid(),
        "cpu_share": run.cpu_share,
        "poll_s": run.poll_s,
        "failures": run.failures,
        "xids": [asdict(xid) for xid in run.xids],
        "samples": [
            {**asdict(sample), "facts": _flat(sample), "mig_instances": len(sample.mig_instances)}
            for sample in run.last.values()
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
        raise argparse.ArgumentTypeError(f"{word!r} must be a number of seconds above 0")
    return number


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 where the agent and nvidia-smi agree."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nvml_on_gpu")
    parser.add_argument("--seconds", type=_positive, default=60.0)
    parser.add_argument("--interval", type=_positive, default=1.0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    times, run = CallTimes(), NvmlRun(NvmlSource(timeout_s=60))
    with times.measuring():
        run.read_for(options.seconds, options.interval)
    print(*lines(run), "cost of each call:", *times.lines(), sep="\n")
    result = record(run, times)
    # Written before nvidia-smi runs, which may fail in ways of its own.
    _write(options.output, result)
    try:
        agree = _checked(run, options.interval, result)
    except NvidiaSmiFailed as failed:
        print(f"NOT CHECKED: {failed}")
        agree = False
    run.source.close()
    _write(options.output, result)
    return 0 if agree else 1


def _write(output: Path | None, result: dict[str, Any]) -> None:
    if output:
        output.write_text(json.dumps(result, indent=1))


def _checked(run: NvmlRun, interval_s: float, result: dict[str, Any]) -> bool:
    """Whether nvidia-smi agrees. Raises NvidiaSmiFailed."""

    def now() -> dict[str, GpuSample]:
        run.read()
        return dict(run.last)

    verdicts = compare_until_they_agree(now, lambda: time.sleep(interval_s))
    result["verdicts"] = verdicts
    for gpu, row in verdicts.items():
        print(*(f"  {gpu} {query}: {verdict}" for query, verdict in row.items()), sep="\n")
    print(f"not checked, for nvidia-smi does not report them: {', '.join(unchecked())}")
    print("the agent and nvidia-smi agree" if agreed(verdicts) else "THEY DIFFER")
    return agreed(verdicts)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
