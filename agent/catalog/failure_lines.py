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
    PAUSED = "paused"
    RESUMED = "resumed"


@dataclass(frozen=True, slots=True)
class FailureLine:
    """A text and its meaning; its group `exit_code`, if any, holds the code of a lost process.

    `words` are in every line that the text fits, and are faster to look for.
    """

    text: re.Pattern[str]
    words: str
    meaning: LineMeaning
    source: str


# The log of these engines tells of every stop that is not a kill; silence is one.
SAY_THAT_THEY_END = frozenset({"vllm"})

# These serve a page only once they can compute, and answer their health check with 503 beside it
# only once they cannot any more (vLLM `entrypoints/serve/instrumentator/health.py`). Others answer
# so while they start, or while they finish what they have before they stop.
UNHEALTHY_ONLY_WHEN_DEAD = frozenset({"vllm"})

# These carry what users wrote, and users write of errors. vLLM 0.32
# `entrypoints/serve/utils/request_logger.py`, older `entrypoints/logger.py`; the access log of
# uvicorn (`protocols/http/*_impl.py`), which quotes whatever path was asked for; the name of a
# model that is not served (vLLM `entrypoints/serve/engine/serving.py` and those that log it); the
# bodies of answers (`entrypoints/serve/middleware/log_response.py`). A line that names a second
# place of the code behind a quote quotes another line; without one, a program that runs the engine
# logged the engine's own line again.
USER_TEXT = re.compile(
    r"Received request |Request \S+ details: |Generated response |\"[^\s\"]+ \S* HTTP/\d"
    r"|Error with model |does not exist|response_body=|\.py:\d+\][^\"'`]*[\"'`].*\.py:\d+\]"
)


def _line(text: str, meaning: LineMeaning, source: str) -> FailureLine:
    words = re.sub(r"\?P<\w+>", "", text)
    return FailureLine(re.compile(text), words, meaning, source)


def _logged(module: str, text: str, meaning: LineMeaning, source: str) -> FailureLine:
    """A text that a module of vLLM begins its line with, as text or as JSON; elsewhere it quotes.

    vLLM 0.8 to 0.33 `logger.py`; at the level DEBUG the module stands with its folders. A format of
    the operator's own (`VLLM_LOGGING_CONFIG_PATH`) is known by the level or the module that stands
    somewhere before the text, and by the text that ends the line, with nothing quoted before it.
    """
    vllm = rf"\bINFO (?:[\d:., T-]+ )?\[(?:[\w/]+/)?{module}\.py:\d+\] {text}"
    json = rf"\"message\":\s*\"{text}"
    own = (
        rf"^(?!.*(?<!{module})\.py:\d+\])(?=[^\"'`{{}}]*(?:\bINFO\b|[\[/]{module}\.py:\d+\]))"
        rf"[^\"'`{{}}]*(?<!\w){text}\.?\s*$"
    )
    return FailureLine(re.compile(f"{vllm}|{json}|{own}"), text, meaning, source)


# How an error of CUDA is told, up to CUDA's own words for it: by PyTorch's
# c10/cuda/CUDAException.cpp and c10/cuda/driver_api.h, vLLM's csrc/cumem_allocator.cpp, Triton's
# third_party/nvidia/backend/driver.c and NCCL's src/include/{checks,cudawrap}.h.
_CUDA_SAYS = (
    r"(?:\b(?:CUDA|HIP)(?: driver)? [Ee]rror: |\bTriton Error \[(?:CUDA|HIP)\]: "
    r"|\bCuda failure (?:\d+ )?')"
)
_FROM_CUDA = "PyTorch, vLLM's allocator, Triton and NCCL, as _CUDA_SAYS tells"

# Errors that CUDA reports for a program's own mistake (CUDA runtime API, `cudaError_t`).
_PROGRAM_ERRORS = (
    "device-side assert|no kernel image|device kernel image|invalid|the provided PTX|"
    "driver shutting down|initialization error|operation not (?:permitted|supported)|"
    "no CUDA-capable device|peer access|CUDA driver version|API call is not supported"
)

FAILURE_LINES: tuple[FailureLine, ...] = (
    _logged(
        "launcher",
        r"\[shutdown\] API server: shutdown triggered",
        LineMeaning.STOPPING,
        "vLLM 0.32 entrypoints/launchers/launcher.py",
    ),
    _logged(
        "launcher",
        r"(?:\[shutdown\] API server: )?[Ss]hutting down FastAPI HTTP server",
        LineMeaning.STOPPING,
        "vLLM 0.32 as above; older vLLM entrypoints/launcher.py, reached by a signal only",
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
        r"\bOutOfMemoryError\b|\b(?:CUDA|HIP) out of memory\b",
        LineMeaning.CUDA_OOM,
        "PyTorch c10/cuda/CUDACachingAllocator.cpp",
    ),
    _line(rf"{_CUDA_SAYS}out of memory", LineMeaning.CUDA_OOM, _FROM_CUDA),
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
        r"To serve at least one request with the models?'s max seq len",
        LineMeaning.SIZING_ERROR,
        "vLLM v1/core/kv_cache_utils.py; `models's` before 0.32",
    ),
    _line(
        r"model's max seq len \(\d+\) is larger than the maximum number of tokens",
        LineMeaning.SIZING_ERROR,
        "vLLM to 0.10 with its first engine, worker/worker.py",
    ),
    _line(
        r"Cannot auto-fit max_model_len: not enough GPU memory",
        LineMeaning.SIZING_ERROR,
        "vLLM v1/core/kv_cache_utils.py",
    ),
    _line(rf"{_CUDA_SAYS}(?!{_PROGRAM_ERRORS})", LineMeaning.GPU_FAULT, _FROM_CUDA),
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
        r"Engine process failed to start\. See stack trace",
        LineMeaning.START_FAILED,
        "vLLM to 0.10 with its first engine, entrypoints/openai/api_server.py",
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
        r"EngineCore hit an exception: |\b[Gg]ot fatal signal from worker processes",
        LineMeaning.DEAD,
        "vLLM to 0.8.4: v1/engine/core.py, v1/engine/core_client.py, v1/executor/"
        "multiproc_executor.py; at the start as at work",
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
    # /pause, which those use who change the weights of a running engine.
    _logged(
        "scheduler",
        "setting pause state to PAUSED_ALL",
        LineMeaning.PAUSED,
        "vLLM 0.32 v1/core/sched/scheduler.py: no request is computed on",
    ),
    _logged(
        "scheduler",
        "setting pause state to (?:UNPAUSED|PAUSED_NEW)",
        LineMeaning.RESUMED,
        "vLLM 0.32 v1/core/sched/scheduler.py: those that run are computed on",
    ),
)

# One search that almost every line fails, so that only few lines are tried row by row.
_ANY_WORDS = re.compile("|".join(row.words for row in FAILURE_LINES))


def meaning_of(line: str) -> tuple[LineMeaning, int | None] | None:
    """What a line says and the exit code that it tells; None for a line of no concern."""
    if not _ANY_WORDS.search(line) or USER_TEXT.search(line):
        return None
    for row in FAILURE_LINES:
        if found := row.text.search(line):
            return row.meaning, _exit_code(found)
    return None


def _exit_code(found: re.Match[str]) -> int | None:
    told = found.groupdict().get("exit_code")
    return None if told is None else int(told)
