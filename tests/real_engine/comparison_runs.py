"""Records pairs of runs of vLLM's benchmark on real engines, for the tests of the comparison.

Run as a module, it writes those that are missing to tests/data/comparison, in about two minutes
each. Where the load is the same, both runs of a pair are made at the same time, so that other work
of the machine slows down both alike.
"""

import gzip
import json
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from tests.real_parts.bench import BenchmarkRunner, Limits, Load
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import SpanExport, Vllm

FOLDER = Path(__file__).parents[1] / "data" / "comparison"
LIMITS = Limits(ttft_ms=1000, tpot_ms=100)
# Texts and token times are most of a file, and the comparison does not read them.
_LEFT_OUT = ("generated_texts", "itls", "queue_times")
# The engines, by how many requests each runs at once.
BATCHES = {"whole": 8, "half": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPair:
    """Two runs, of the engines of these names."""

    name: str
    engines: tuple[str, str]
    loads: tuple[Load, Load]
    at_once: bool = True

    @property
    def files(self) -> tuple[str, str]:
        """The names of their files."""
        return f"{self.name}-before.json.gz", f"{self.name}-after.json.gz"


def _clients(number: int, clients: int, prompts: int) -> Load:
    return Load(
        name=f"clients-{number}",
        requests_per_s=inf,
        concurrency=clients,
        prompts=prompts,
        output_tokens=16,
        seed=number,
    )


def _rate(number: int, requests_per_s: float) -> Load:
    return Load(
        name=f"rate-{number}",
        requests_per_s=requests_per_s,
        prompts=60,
        output_tokens=16,
        seed=number,
    )


def pairs() -> Iterator[RunPair]:
    """All pairs; each run has prompts of its own, and so have two at one engine."""
    whole = ("whole", "whole")
    for number in range(20):
        loads = _clients(100 + number, 8, 100), _clients(200 + number, 8, 100)
        yield RunPair(name=f"same-{number:02}", engines=whole, loads=loads)
    rates = _rate(300, 0.5), _rate(400, 1.25)
    yield RunPair(name="load-00", engines=whole, loads=rates, at_once=False)
    # Twice as many clients as the engine runs at once, so that its batch size matters.
    loads = _clients(500, 16, 200), _clients(600, 16, 200)
    yield RunPair(name="half-00", engines=("whole", "half"), loads=loads)


def kept(result: dict[str, Any]) -> dict[str, Any]:
    """A result file without what is left out, its times to the tenth of a millisecond."""
    return {name: _rounded(value) for name, value in result.items() if name not in _LEFT_OUT}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def record(engines: Mapping[str, Vllm], into: Path = FOLDER) -> None:
    """Make the runs whose files are not there, and write these."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        places = [Path(folder) / str(number) for number in range(2)]
        sides = [_Side(place, stack) for place in places]
        threads = stack.enter_context(ThreadPoolExecutor(2))
        missing = [
            pair for pair in pairs() if not all((into / name).exists() for name in pair.files)
        ]
        for pair in missing:
            made = []
            for side, engine, load in zip(sides, pair.engines, pair.loads, strict=True):
                made.append(threads.submit(side.run, engines[engine], load))
                if not pair.at_once:
                    made[-1].result()
            for name, result in zip(pair.files, made, strict=True):
                packed = gzip.compress(json.dumps(kept(result.result())).encode(), mtime=0)
                (into / name).write_bytes(packed)


class _Side:
    """A benchmark in a folder of its own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        folder.mkdir()
        self._folder = folder
        self._benchmark = stack.enter_context(BenchmarkRunner(folder))

    def run(self, engine: Vllm, load: Load) -> dict[str, Any]:
        """The content of the result file."""
        (self._folder / "benchmarks.done").unlink(missing_ok=True)
        self._benchmark.run(engine, [load], LIMITS, self._folder)
        found: dict[str, Any] = json.loads((self._folder / load.file_name).read_text())
        return found


def _engine(folder: Path, batch: int) -> Vllm:
    folder.mkdir()
    return Vllm(
        folder,
        port=free_port(),
        spans=SpanExport.grpc(free_port()),
        extra=("--max-num-seqs", str(batch), "--no-enable-prefix-caching"),
    )


def _main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        record(
            {
                name: stack.enter_context(_engine(Path(folder) / name, batch))
                for name, batch in BATCHES.items()
            }
        )


if __name__ == "__main__":
    _main()
