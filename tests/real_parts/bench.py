"""vLLM's own serving benchmark against the real engine, and its figures of each request."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.real_parts.processes import ServerProcess
from tests.real_parts.tiny_model import engine_command, tiny_model
from tests.real_parts.vllm import Vllm, span_request_id

RUNNER = Path(__file__).with_name("run_benchmarks.py")
# Importing vLLM alone takes about 15 s on two busy cores.
FINISH_WITHIN_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One benchmark run: random prompts, sent at `requests_per_s` as a Poisson process.

    Of `concurrency` clients each waits for its response before it sends again.
    """

    name: str
    requests_per_s: float
    prompts: int
    seed: int = 1
    input_tokens: int = 32
    output_tokens: int = 48
    concurrency: int | None = None

    @property
    def file_name(self) -> str:
        """The name of the file of its result."""
        return f"{self.name}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of the benchmark's own goodput."""

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchedRequest:
    """One request as the benchmark's client measured it; `request_id` is the engine's id."""

    request_id: str
    input_tokens: int
    output_tokens: int
    ttft_s: float
    latency_s: float
    error: str

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first, as the benchmark defines it."""
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """The content of the benchmark's detailed file of one run."""

    load: Load
    duration_s: float
    goodput_rps: float
    requests: tuple[BenchedRequest, ...]


class BenchmarkRunner:
    """A process that has loaded vLLM's benchmark and runs it on demand."""

    def __init__(self, folder: Path) -> None:
        self._plans = folder / "plans.pipe"
        os.mkfifo(self._plans)
        self._process = ServerProcess(
            [*engine_command(RUNNER), self._plans],
            folder / "benchmarks.log",
            environment={"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        )

    def run(
        self,
        engine: Vllm,
        loads: Sequence[Load],
        limits: Limits,
        folder: Path,
        *,
        url: str | None = None,
    ) -> list[BenchmarkResult]:
        """One result per load, run in order; `url` replaces the engine's own address."""
        plan = folder / "benchmarks.json"
        runs = [_arguments(engine, url or engine.url, load, limits, folder) for load in loads]
        plan.write_text(json.dumps(runs))
        # Opened for reading too: opening does not wait for the runner.
        plans = os.open(self._plans, os.O_RDWR)
        try:
            os.write(plans, f"{plan}\n".encode())
            self._process.wait_until(plan.with_suffix(".done").exists, within_s=FINISH_WITHIN_S)
        finally:
            os.close(plans)
        return [_result(load, folder) for load in loads]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()


def _arguments(engine: Vllm, url: str, load: Load, limits: Limits, folder: Path) -> list[str]:
    return [
        *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
        *("--model", engine.model, "--tokenizer", str(tiny_model())),
        *("--dataset-name", "random", "--random-range-ratio", "0.5", "--temperature", "0"),
        *("--random-input-len", str(load.input_tokens)),
        *("--random-output-len", str(load.output_tokens)),
        *("--num-prompts", str(load.prompts), "--request-rate", str(load.requests_per_s)),
        *([] if load.concurrency is None else ["--max-concurrency", str(load.concurrency)]),
        *("--seed", str(load.seed), "--request-id-prefix", _prefix(load)),
        *("--goodput", f"ttft:{limits.ttft_ms}", f"tpot:{limits.tpot_ms}"),
        *("--save-result", "--save-detailed", "--result-dir", str(folder)),
        *("--result-filename", load.file_name, "--disable-tqdm"),
        # Its readiness check would be one more request, with another id.
        *("--ready-check-timeout-sec", "0"),
    ]


def _prefix(load: Load) -> str:
    return f"{load.name}-"


def _result(load: Load, folder: Path) -> BenchmarkResult:
    detailed: dict[str, Any] = json.loads((folder / load.file_name).read_text())
    columns = ("input_lens", "output_lens", "ttfts", "latencies", "errors")
    rows = zip(*(detailed[column] for column in columns), strict=True)
    return BenchmarkResult(
        load=load,
        duration_s=detailed["duration"],
        goodput_rps=detailed["request_goodput"],
        requests=tuple(
            BenchedRequest(
                request_id=span_request_id(f"{_prefix(load)}{position}"),
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                ttft_s=ttft_s,
                latency_s=latency_s,
                error=error,
            )
            for position, (input_tokens, output_tokens, ttft_s, latency_s, error) in enumerate(rows)
        ),
    )
