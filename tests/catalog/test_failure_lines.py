"""Log lines about failures, and lines that only resemble them."""

from pathlib import Path

import pytest

from agent.catalog.failure_lines import FAILURE_LINES, LineMeaning, meaning_of

# What strangers sent.
FOREIGN = Path(__file__).parents[1] / "data" / "foreign"

# Lines of vLLM 0.8 to 0.33, PyTorch 2 and uvicorn, some without their end.
LINES = {
    LineMeaning.CUDA_OOM: """
(EngineCore pid=9) ERROR [core.py:1512] torch.OutOfMemoryError: CUDA out of memory. Tried
torch.cuda.OutOfMemoryError: CUDA out of memory.
torch.OutOfMemoryError: HIP out of memory. Tried to allocate
RuntimeError: CUDA error: out of memory
Worker failed with error 'CUDA out of memory. Tried to allocate 20 MiB', please check the
Failed to load model - not enough GPU memory. Try lowering (original error: CUDA out of
RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests
CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62
RuntimeError: CUDA driver error: out of memory
RuntimeError: Triton Error [CUDA]: out of memory
ncclUnhandledCudaError: Last error: Cuda failure 2 'out of memory'
[TensorRT-LLM][ERROR] CUDA runtime error in cudaMalloc(ptr, n): out of memory (/src/tensorrt_llm
""",
    LineMeaning.SIZING_ERROR: """
ValueError: No available memory for the cache blocks. Try
ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB
ValueError: To serve at least one request with the models's max seq len (204800), (48.44
ValueError: The model's max seq len (131072) is larger than the maximum number of tokens
RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.
""",
    LineMeaning.PAUSED: """
INFO [scheduler.py:2756] setting pause state to PAUSED_ALL
vllm.v1.core.sched.scheduler INFO setting pause state to PAUSED_ALL
""",
    LineMeaning.RESUMED: """
INFO [scheduler.py:2756] setting pause state to PAUSED_NEW
INFO [scheduler.py:2756] setting pause state to UNPAUSED
""",
    LineMeaning.GPU_FAULT: """
CUDA Error: an illegal memory access was encountered at /w/csrc/cumem_allocator.cpp:62
RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered
RuntimeError: CUDA driver error: unspecified launch failure
NCCL WARN Cuda failure 'unspecified launch failure'
NCCL WARN Cuda failure 719 'unspecified launch failure'
RuntimeError: CUDA error: unspecified launch failure
RuntimeError: CUDA error: an illegal memory access was enc
torch.AcceleratorError: CUDA error: uncorrectable ECC error
RuntimeError: HIP error: unspecified launch failure
[TensorRT-LLM][ERROR] CUDA runtime error in cudaEventSynchronize(get()): an illegal memory access
[E ProcessGroupNCCL.cpp:1895] Process group watchdog: CUDA error: an illegal memory access was
""",
    LineMeaning.START_FAILED: """
ERROR [core.py:1510] EngineCore failed to start.
RuntimeError: Engine process failed to start. See stack trace for the root cause.
[2026-07-09 00:57:15] Initialization failed. warmup error: Traceback (most recent call last):
[TRT-LLM] [E] Executor worker died during initialization.
[TensorRT-LLM][ERROR] [executor][RANK 0] Failed to initialize executor
""",
    LineMeaning.HANG: """
TimeoutError: RPC call to execute_model timed out.
""",
    LineMeaning.DEAD: """
ERROR [core.py:1512] EngineCore encountered a fatal error.
[shutdown] MPClient: engine core exited unexpectedly; starting
Engine core proc EngineCore_0 died unexpectedly, shutting down client.
ERROR [core.py:387] EngineCore hit an exception: Traceback (most
CRITICAL [core_client.py:361] Got fatal signal from worker processes, shutting down. See
ERROR [async_llm.py:906] AsyncLLM output_handler failed.
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace
(Worker_TP1 pid=77) ERROR [multiproc_executor.py:1063] WorkerProc hit an exception.
[2026-07-09 00:57:15 TP4] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)
[2026-07-09 00:57:15 TP4] Scheduler hit an exception: Traceback (most recent call last):
[2026-07-09 00:57:15] DetokenizerManager hit an exception: Traceback (most recent call last):
[2026-07-09 00:57:15] Subprocess scheduler_0 (pid=77) crashed with exit code -11. Triggering
RayWorkerProc rank=3 died unexpectedly, shutting down executor.
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
mpirun noticed that process rank 1 with PID 0 on node gpu-7 exited on signal 9 (Killed).
[gpu-7:00123] *** Process received signal ***
terminate called after throwing an instance of 'c10::DistBackendError'
Fatal Python error: Segmentation fault
[Rank 3] NCCL watchdog thread terminated with exception: CUDA driver shutting down
[F1229 20:37:13.09 ProcessGroupNCCL.cpp:1306] Terminating the process after attempting to dump debug
[2026-07-09 00:57:20] SIGQUIT received. signum=<Signals.SIGQUIT: 3>, frame=None. It usually
[TRT-LLM] [RANK 0] [E] Hang detected on rank 0 in PyExecutor; hard-killing and propagating to
[PG 0 Rank 25] Heartbeat monitor timed out! Process will be terminated after dumping debug info.
""",
    LineMeaning.STOPPING: """
INFO [launcher.py:254] [shutdown] API server: shutdown triggered
INFO [launcher.py:60] Shutting down FastAPI HTTP server.
INFO 11-21 04:34:41 [launcher.py:304] [shutdown] API server: shutting down FastAPI HTTP server
{"levelname":"INFO","message":"[shutdown] API server: shutdown triggered"}
vllm.entrypoints.launchers.launcher INFO [shutdown] API server: shutdown triggered
2026-11-21 04:34:41,123 [launcher.py:254] INFO: Shutting down FastAPI HTTP server.
04:34:41 [launcher.py:254] [shutdown] API server: shutdown triggered
""",
    LineMeaning.FRONT_ENDED: """
INFO:     Waiting for application shutdown.
INFO:     Application shutdown complete.
""",
    LineMeaning.LAST_STATS: """
ERROR Dumping scheduler stats: SchedulerStats(num_running
""",
}
# Longer ones.
LONG_LINES = [
    (
        "ValueError: Free memory on device cuda:0 (10.1/79.2 GiB) on startup is less than "
        "desired GPU memory utilization (0.9, 71.2 GiB). Decrease",
        LineMeaning.SIZING_ERROR,
    ),
    (
        "ValueError: Available memory on node 0 (3.1/23.2 GiB) on startup is less than "
        "desired CPU memory utilization (0.9, 20 GiB).",
        LineMeaning.SIZING_ERROR,
    ),
    (
        "(EngineCore pid=9) INFO 11-21 15:58:01 [v1/core/sched/scheduler.py:2756] setting "
        "pause state to PAUSED_ALL",
        LineMeaning.PAUSED,
    ),
    (
        "CRITICAL [multiproc_executor.py:49] MulitprocExecutor got fatal signal from worker "
        "processes, shutting down. See stack trace above for root cause issue.",
        LineMeaning.DEAD,
    ),
    (
        "ERROR [replica.py:12] (EngineCore pid=9) ERROR 11-21 [core.py:710] EngineCore "
        "encountered a fatal error.",
        LineMeaning.DEAD,
    ),
    (
        "(APIServer pid=9) INFO 11-21 04:34:41 [entrypoints/launchers/launcher.py:254] "
        "[shutdown] API server: shutdown triggered",
        LineMeaning.STOPPING,
    ),
    (
        '{"asctime": "2026-11-21 04:34:41", "levelname": "INFO", "name": "vllm.entrypoints", '
        '"process": 9, "message": "[shutdown] API server: shutdown triggered"}',
        LineMeaning.STOPPING,
    ),
    (
        "INFO [replica.py:12] (APIServer pid=9) INFO 11-21 04:34:41 [launcher.py:254] "
        "[shutdown] API server: shutdown triggered",
        LineMeaning.STOPPING,
    ),
]
LINES_WITH_A_MEANING = [
    *((line, meaning) for meaning, text in LINES.items() for line in text.strip().splitlines()),
    *LONG_LINES,
]

# Lines of a healthy engine, and lines with the text of users about failures.
LINES_WITHOUT_A_MEANING = [
    'INFO:     127.0.0.1:50152 - "POST /v1/completions HTTP/1.1" 200 OK',
    '(APIServer pid=1) INFO:     10.0.0.9:50 - "GET /v1/models?OutOfMemoryError HTTP/1.1" 200 OK',
    'INFO:     10.0.0.9:50152 - "POST /EngineDeadError HTTP/1.1" 404 Not Found',
    'INFO:     10.0.0.9:50152 - "HEAD /v1?a=EngineDeadError&b=%27 HTTP/2" 200',
    "INFO:     Application startup complete.",
    "INFO:     Shutting down",
    "INFO 11-21 Engine 000: Avg prompt throughput: 5.1 tokens/s, Preemptions: 12",
    "[shutdown] EngineCore: trigger received signal=SIGTERM",
    "[shutdown] Process manager: send sigterm to process EngineCore_DP1",
    "WARNING Sequence group 7 is preempted by PreemptionMode.RECOMPUTE mode",
    "INFO Received request cmpl-1: params: SamplingParams(), prompt 'CUDA out of memory'",
    "DEBUG Request cmpl-1 details: prompt: 'why torch.OutOfMemoryError?', prompt_token_ids",
    "INFO Generated response cmpl-1: output: 'EngineDeadError means', finish_reason: stop",
    "RuntimeError: CUDA error: device-side assert triggered",
    "INFO [log_response.py:141] response_body={The model EngineDeadError is unknown}",
    "vllm.exceptions.VLLMNotFoundError: The model `EngineDeadError` does not exist.",
    "setting pause state to PAUSED_ALL",
    "ERROR 11-21 04:35:57 [serving.py:91] setting pause state to PAUSED_ALL",
    "ERROR 11-21 [serving.py:91] x [launcher.py:2] [shutdown] API server: shutdown triggered",
    r'{"message": "x \"message\": \"[shutdown] API server: shutdown triggered"}',
    r'{"message":"x \"message\":\"[shutdown] API server: shutdown triggered"}',
    "vllm.serving INFO no such tool: '[shutdown] API server: shutdown triggered",
    "vllm.serving INFO no such tool: {[shutdown] API server: shutdown triggered",
    "vllm.serving INFO no such tool: `[shutdown] API server: shutdown triggered",
    "vllm.serving INFO [shutdown] API server: shutdown triggered, says a user",
    "vllm.serving ERROR [shutdown] API server: shutdown triggered",
    "ERROR [serving.py:91] no tool 'x [core.py:710] EngineCore encountered a fatal error.'",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "RuntimeError: CUDA error: invalid device ordinal",
    "RuntimeError: Triton Error [CUDA]: device kernel image is invalid",
    "NCCL WARN Cuda failure 217 'peer access is not supported between these two devices'",
    "NCCL WARN Cuda failure 'invalid argument'",
    "",
]


@pytest.mark.parametrize(
    ("line", "meaning"), LINES_WITH_A_MEANING, ids=lambda value: str(value)[:40]
)
def test_a_line_about_a_failure_has_a_meaning(line: str, meaning: LineMeaning) -> None:
    found = meaning_of(line)
    assert found is not None
    assert found[0] is meaning


@pytest.mark.parametrize("line", LINES_WITHOUT_A_MEANING, ids=lambda value: value[:40])
def test_a_line_without_a_meaning_is_ignored(line: str) -> None:
    assert meaning_of(line) is None


@pytest.mark.parametrize(
    ("line", "meaning"), LINES_WITH_A_MEANING, ids=lambda value: str(value)[:40]
)
def test_a_model_name_in_a_request_is_no_line_of_the_engine(
    line: str, meaning: LineMeaning
) -> None:
    """vLLM 0.32 `entrypoints/openai/chat_completion/serving.py` and others."""
    logged = (
        "(APIServer pid=1) ERROR 11-21 04:35:57 [serving.py:274] Error with model ErrorResponse("
        f"error=ErrorInfo(message='The model `{line}` is not here.', code=404))"
    )
    assert meaning_of(logged) is None


@pytest.mark.parametrize(
    ("line", "exit_code"),
    [
        ("Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down", -9),
        ("RayWorkerProc died unexpectedly. Worker proc w-0 died unexpectedly, shutting", None),
        (
            "RuntimeError: Engine core initialization failed. See root cause above. "
            "Failed core proc(s): {'EngineCore_DP0': -9, 'EngineCore_DP1': 1}",
            -9,
        ),
        (
            "RuntimeError: Engine core initialization failed. See root cause above. "
            "Failed core proc(s): {}",
            None,
        ),
    ],
)
def test_the_exit_code_of_a_lost_process_is_read(line: str, exit_code: int | None) -> None:
    found = meaning_of(line)
    assert found is not None
    assert found[1] == exit_code


@pytest.mark.parametrize(
    ("log", "first", "dead"),
    [
        ("50-sglang-watchdog.log", "TP4] Watchdog timeout", 9),
        ("52-vllm-nccl-collective-timeout.log", "Watchdog caught collective operation", 3),
    ],
)
def test_a_crash_log_of_a_stranger_says_what_ended_the_engine(
    log: str, first: str, dead: int
) -> None:
    lines = (FOREIGN / log).read_text().splitlines()
    ends = [line for line in lines if (meaning_of(line) or (None,))[0] is LineMeaning.DEAD]
    assert first in ends[0]
    assert len(ends) == dead


def test_a_watchdog_that_only_warns_is_no_death() -> None:
    line = "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=True)"
    assert meaning_of(line) is None


def test_every_row_names_its_source_and_matches_some_line() -> None:
    assert all(row.source for row in FAILURE_LINES)
    lines = [line for line, _ in LINES_WITH_A_MEANING] + [
        "Worker proc VllmWorker-1 died unexpectedly (exit code: -9)",
        "Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "Cannot auto-fit max_model_len: not enough GPU memory available",
    ]
    unreached = [
        row.text.pattern for row in FAILURE_LINES if not any(row.text.search(x) for x in lines)
    ]
    assert unreached == []
