"""What lines of an engine's log say of its fate: one row per text, with where the text is from.

The rows are tried in their order, and the first that fits counts.
"""

import re
from dataclasses import dataclass
from enum import StrEnum


class LineMeaning(StrEnum):
    """What a line says."""

    STOPPING = "stopping"
    CUDA_OOM = "cuda_oom"
    SIZING_ERROR = "sizing_error"
    GPU_FAULT = "gpu_fault"
    START_FAILED = "start_failed"
    HANG = "hang"
    DEAD = "dead"
    LAST_STATS = "last_stats"
    FRONT_ENDED = "front_ended"


@dataclass(frozen=True, slots=True)
class FailureLine:
    """A text and its meaning; its group `exit_code`, if any, holds the code of a lost process."""

    text: re.Pattern[str]
    meaning: LineMeaning
    source: str


# The log of these engines tells of every stop that is not a kill; silence is one.
SAY_THAT_THEY_END = frozenset({"vllm"})

# These carry what users wrote, and users write of errors. vLLM 0.32
# `entrypoints/serve/utils/request_logger.py`, older `entrypoints/logger.py`.
USER_TEXT = re.compile(r"Received request |Request \S+ details: |Generated response ")


def _line(text: str, meaning: LineMeaning, source: str) -> FailureLine:
    return FailureLine(re.compile(text), meaning, source)


# Errors that CUDA reports for a program's own mistake (CUDA runtime API, `cudaError_t`).
_PROGRAM_ERRORS = (
    "device-side assert|no kernel image|invalid|the provided PTX|driver shutting down|"
    "initialization error|operation not (?:permitted|supported)|no CUDA-capable device"
)

FAILURE_LINES: tuple[FailureLine, ...] = (
    _line(
        r"\[shutdown\] API server: shutdown triggered",
        LineMeaning.STOPPING,
        "vLLM 0.32 entrypoints/launchers/launcher.py",
    ),
    _line(
        r"[Ss]hutting down FastAPI HTTP server",
        LineMeaning.STOPPING,
        "older vLLM entrypoints/launcher.py, reached by a signal only",
    ),
    _line(
        r"Failed to load model - not enough GPU memory",
        LineMeaning.CUDA_OOM,
        "vLLM v1/worker/gpu_model_runner.py",
    ),
    _line(
        r"CUDA out of memory occurred when warming up",
        LineMeaning.CUDA_OOM,
        "vLLM v1/worker/gpu_model_runner.py",
    ),
    _line(
        r"\bOutOfMemoryError\b|\b(?:CUDA|HIP) out of memory\b|CUDA error: out of memory",
        LineMeaning.CUDA_OOM,
        "PyTorch c10/cuda/CUDACachingAllocator.cpp; CUDA runtime cudaErrorMemoryAllocation",
    ),
    _line(
        r"memory on (?:device|node) .* on startup is less than desired [GC]PU memory utilization",
        LineMeaning.SIZING_ERROR,
        "vLLM v1/worker/utils.py and cpu_worker.py; another process holds the memory",
    ),
    _line(
        r"No available memory for the cache blocks",
        LineMeaning.SIZING_ERROR,
        "vLLM v1/core/kv_cache_utils.py",
    ),
    _line(
        r"To serve at least one request with the model's max seq len",
        LineMeaning.SIZING_ERROR,
        "vLLM v1/core/kv_cache_utils.py",
    ),
    _line(
        r"Cannot auto-fit max_model_len: not enough GPU memory",
        LineMeaning.SIZING_ERROR,
        "vLLM v1/core/kv_cache_utils.py",
    ),
    _line(
        rf"\b(?:CUDA|HIP) error: (?!{_PROGRAM_ERRORS})",
        LineMeaning.GPU_FAULT,
        "PyTorch c10/cuda/CUDAException.cpp",
    ),
    _line(
        r"EngineCore failed to start\.",
        LineMeaning.START_FAILED,
        "vLLM v1/engine/core.py",
    ),
    _line(
        r"Engine core initialization failed\. See root cause above\."
        r"(?: Failed core proc\(s\): \{[^}:]*: (?P<exit_code>-?\d+))?",
        LineMeaning.START_FAILED,
        "vLLM v1/engine/utils.py",
    ),
    _line(
        r"RPC call to \w+ timed out\.",
        LineMeaning.HANG,
        "vLLM v1/executor/multiproc_executor.py, after VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
    ),
    _line(
        r"Worker proc \S+ died unexpectedly(?: \(exit code: (?P<exit_code>-?\d+)\))?",
        LineMeaning.DEAD,
        "vLLM v1/executor/multiproc_executor.py",
    ),
    _line(
        r"engine core exited unexpectedly|[Ee]ngine core proc(?:ess)? .* died unexpectedly",
        LineMeaning.DEAD,
        "vLLM v1/engine/core_client.py and v1/utils.py; older v1/engine/core_client.py",
    ),
    _line(
        r"EngineCore encountered a fatal error\.",
        LineMeaning.DEAD,
        "vLLM v1/engine/core.py",
    ),
    _line(
        r"AsyncLLM output_handler failed\.",
        LineMeaning.DEAD,
        "vLLM v1/engine/async_llm.py",
    ),
    _line(
        r"EngineDeadError\b|EngineCore encountered an issue\. See stack trace",
        LineMeaning.DEAD,
        "vLLM v1/engine/exceptions.py",
    ),
    _line(
        r"Dumping scheduler stats: ",
        LineMeaning.LAST_STATS,
        "vLLM logging_utils/dump_input.py",
    ),
    # Said after a normal stop and after the death of the core alike, but never by what was killed.
    _line(
        r"(?:Waiting for application|Application) shutdown",
        LineMeaning.FRONT_ENDED,
        "uvicorn lifespan/on.py",
    ),
)

# One search that almost every line fails, so that only few lines are tried row by row.
_ANY_TEXT = re.compile("|".join(re.sub(r"\?P<\w+>", "", row.text.pattern) for row in FAILURE_LINES))


def meaning_of(line: str) -> tuple[LineMeaning, int | None] | None:
    """What a line says and the exit code that it tells; None for a line of no concern."""
    if not _ANY_TEXT.search(line) or USER_TEXT.search(line):
        return None
    for row in FAILURE_LINES:
        if found := row.text.search(line):
            return row.meaning, _exit_code(found)
    return None


def _exit_code(found: re.Match[str]) -> int | None:
    told = found.groupdict().get("exit_code")
    return None if told is None else int(told)
