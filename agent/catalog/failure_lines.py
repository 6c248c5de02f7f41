"""The lines of an engine's log that matter for failures: one row per text, with its source.

Rows are tried in their order; the first that matches counts.
"""

import re
from dataclasses import dataclass
from enum import StrEnum


class LineMeaning(StrEnum):
    """The meaning of a line."""

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
    """A text and its meaning; its group `exit_code`, if any, is the code of a lost process.

    `words` match every line that `text` matches, and are faster to search.
    """

    text: re.Pattern[str]
    words: str
    meaning: LineMeaning
    source: str


# These engines log every stop except a kill, so a log that breaks off is evidence of a kill.
SAY_THAT_THEY_END = frozenset({"vllm"})

# These engines send metrics only once they can compute, and then 503 to a health check only when
# they no longer can (vLLM `entrypoints/serve/instrumentator/health.py`). Others send 503 while they
# start, or while they finish their requests before they stop.
UNHEALTHY_ONLY_WHEN_DEAD = frozenset({"vllm"})

# Lines that quote users, who may write about errors. vLLM 0.32
# `entrypoints/serve/utils/request_logger.py`, older `entrypoints/logger.py`; the access log of
# uvicorn (`protocols/http/*_impl.py`), which quotes every path; the name of a model that is not
# served (vLLM `entrypoints/serve/engine/serving.py` and its callers); response bodies
# (`entrypoints/serve/middleware/log_response.py`). A line with a second place in the code behind a
# quote quotes another line. Without a quote, the program that runs the engine logged it again.
USER_TEXT = re.compile(
    r"Received request |Request \S+ details: |Generated response |\"[^\s\"]+ \S* HTTP/\d"
    r"|Error with model |does not exist|response_body=|\.py:\d+\][^\"'`]*[\"'`].*\.py:\d+\]"
)


def _line(text: str, meaning: LineMeaning, source: str) -> FailureLine:
    words = re.sub(r"\?P<\w+>", "", text)
    return FailureLine(re.compile(text), words, meaning, source)


def _logged(module: str, text: str, meaning: LineMeaning, source: str) -> FailureLine:
    """A row for a text that begins a line of a vLLM module, as text or JSON; elsewhere it quotes.

    vLLM 0.8 to 0.33 `logger.py`; at the level DEBUG the module has its folders. In an operator's
    own format (`VLLM_LOGGING_CONFIG_PATH`) the level or the module must come before the text, the
    text must end the line, and no quote may come before it.
    """
    vllm = rf"\bINFO (?:[\d:., T-]+ )?\[(?:[\w/]+/)?{module}\.py:\d+\] {text}"
    json = rf"\"message\":\s*\"{text}"
    own = (
        rf"^(?!.*(?<!{module})\.py:\d+\])(?=[^\"'`{{}}]*(?:\bINFO\b|[\[/]{module}\.py:\d+\]))"
        rf"[^\"'`{{}}]*(?<!\w){text}\.?\s*$"
    )
    return FailureLine(re.compile(f"{vllm}|{json}|{own}"), text, meaning, source)


# What precedes CUDA's own text of an error: in PyTorch's c10/cuda/CUDAException.cpp and
# c10/cuda/driver_api.h, vLLM's csrc/cumem_allocator.cpp, Triton's
# third_party/nvidia/backend/driver.c, NCCL's src/include/{checks,cudawrap}.h and TensorRT-LLM's
# cpp/include/tensorrt_llm/common/cudaUtils.h.
_CUDA_SAYS = (
    r"(?:\b(?:CUDA|HIP)(?: driver)? [Ee]rror: |\bTriton Error \[(?:CUDA|HIP)\]: "
    r"|\bCuda failure (?:\d+ )?'|\bCUDA runtime error in [^:]{1,200}: )"
)
_FROM_CUDA = "PyTorch, vLLM's allocator, Triton, NCCL and TensorRT-LLM, see _CUDA_SAYS"

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
    _line(
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        LineMeaning.SIZING_ERROR,
        "SGLang srt/model_executor/pool_configurator.py",
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
        r"Initialization failed\. warmup error: ",
        LineMeaning.START_FAILED,
        "SGLang srt/entrypoints/http_server.py: ends the process",
    ),
    _line(
        r"Executor worker died during initialization|Failed to initialize executor on rank \d"
        r"|\[executor\]\[RANK \d+\] Failed to initialize executor",
        LineMeaning.START_FAILED,
        "TensorRT-LLM executor/proxy.py, executor/worker.py, cpp/tensorrt_llm/executor",
    ),
    _line(
        r"RPC call to \w+ timed out\.",
        LineMeaning.HANG,
        "vLLM v1/executor/multiproc_executor.py, after VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
    ),
    _line(
        r"Worker ?[Pp]roc (?:rank=)?\S+ died unexpectedly(?: \(exit code: (?P<exit_code>-?\d+)\))?",
        LineMeaning.DEAD,
        "vLLM v1/executor/multiproc_executor.py and ray_executor_v2.py",
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
        r"WorkerProc hit an exception\.",
        LineMeaning.DEAD,
        "vLLM v1/executor/multiproc_executor.py",
    ),
    # With `soft=True` it only warns.
    _line(
        r"\b[Ww]atchdog timeout \(self\.watchdog_timeout=[^,()]+(?:, self\.soft=False)?\)",
        LineMeaning.DEAD,
        "SGLang srt/utils/watchdog.py; to 0.5 srt/managers/scheduler.py: ends the process",
    ),
    _line(
        r"\b(?:Scheduler|DetokenizerManager|TokenizerManager|DataParallelController"
        r"|Multi(?:Tokenizer|Detokenizer)Router) hit an exception: ",
        LineMeaning.DEAD,
        "SGLang srt/managers/{scheduler,detokenizer_manager,tokenizer_manager,"
        "data_parallel_controller,multi_tokenizer_mixin}.py",
    ),
    _line(
        r"\bSubprocess \S+ \(pid=\d+\) crashed with exit code (?P<exit_code>-?\d+)",
        LineMeaning.DEAD,
        "SGLang srt/utils/watchdog.py: ends the process",
    ),
    _line(
        r"\bSIGQUIT received\. signum=|\bReceived sigquit from a child proces",
        LineMeaning.DEAD,
        "SGLang srt/managers/tokenizer_manager.py; to 0.5 srt/entrypoints/engine.py",
    ),
    _line(
        r"\bHang detected on rank \d+ in PyExecutor\b",
        LineMeaning.DEAD,
        "TensorRT-LLM _torch/pyexecutor/py_executor.py: ends the executor",
    ),
    _line(
        r"\bMPI_ABORT was invoked on rank \d|\b(?:mpirun|mpiexec|prterun) noticed that process rank"
        r" \d+ .*exited on signal|\*\*\* Process received signal \*\*\*",
        LineMeaning.DEAD,
        "Open MPI, with which TensorRT-LLM starts its ranks",
    ),
    _line(
        r"\bterminate called after throwing an instance of '|\bFatal Python error: "
        r"|!!!!!!! Segfault encountered !!!!!!!",
        LineMeaning.DEAD,
        "the C++ runtime, CPython Python/pylifecycle.c, PyTorch c10/util/signal_handler.cpp",
    ),
    _line(
        r"\bWatchdog caught collective operation timeout: |\bHeartbeat monitor timed out! Process"
        r" will be terminated|\bwe are taking the entire process down\b"
        r"|\b(?:Process group|NCCL) watchdog thread terminated with exception: "
        r"|\bTerminating the process after attempting to dump debug\b",
        LineMeaning.DEAD,
        "PyTorch torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp",
    ),
    _line(
        r"Dumping scheduler stats: ",
        LineMeaning.LAST_STATS,
        "vLLM logging_utils/dump_input.py",
    ),
    # Logged after a normal stop and after the death of the core, but never by a killed process.
    _line(
        r"(?:Waiting for application|Application) shutdown",
        LineMeaning.FRONT_ENDED,
        "uvicorn lifespan/on.py",
    ),
    # /pause, which operators use to change the weights of a running engine.
    _logged(
        "scheduler",
        "setting pause state to PAUSED_ALL",
        LineMeaning.PAUSED,
        "vLLM 0.32 v1/core/sched/scheduler.py: no request makes progress",
    ),
    _logged(
        "scheduler",
        "setting pause state to (?:UNPAUSED|PAUSED_NEW)",
        LineMeaning.RESUMED,
        "vLLM 0.32 v1/core/sched/scheduler.py: running requests make progress",
    ),
)

# Almost no line matches this one search, so that few lines are tried row by row.
_ANY_WORDS = re.compile("|".join(row.words for row in FAILURE_LINES))


def meaning_of(line: str) -> tuple[LineMeaning, int | None] | None:
    """The meaning of a line and its exit code, if any; None for a line without a meaning."""
    if not _ANY_WORDS.search(line) or USER_TEXT.search(line):
        return None
    for row in FAILURE_LINES:
        if found := row.text.search(line):
            return row.meaning, _exit_code(found)
    return None


def _exit_code(found: re.Match[str]) -> int | None:
    code = found.groupdict().get("exit_code")
    return None if code is None else int(code)
