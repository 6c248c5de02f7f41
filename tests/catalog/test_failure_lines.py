"""Log lines about failures, and lines that only resemble them."""

import pytest

from agent.catalog.failure_lines import FAILURE_LINES, LineMeaning, meaning_of

# Lines of vLLM 0.8 to 0.33, PyTorch 2 and uvicorn.
LINES_WITH_A_MEANING = [
    (
        "(EngineCore pid=9) ERROR [core.py:1512] torch.OutOfMemoryError: CUDA out of memory. "
        "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB",
        LineMeaning.CUDA_OOM,
    ),
    ("torch.cuda.OutOfMemoryError: CUDA out of memory.", LineMeaning.CUDA_OOM),
    ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate", LineMeaning.CUDA_OOM),
    ("RuntimeError: CUDA error: out of memory", LineMeaning.CUDA_OOM),
    (
        "Worker failed with error 'CUDA out of memory. Tried to allocate 20 MiB', please check "
        "the stack trace above for the root cause",
        LineMeaning.CUDA_OOM,
    ),
    (
        "Failed to load model - not enough GPU memory. Try lowering (original error: CUDA out of "
        "memory. Tried to allocate",
        LineMeaning.CUDA_OOM,
    ),
    (
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests",
        LineMeaning.CUDA_OOM,
    ),
    (
        "ValueError: Free memory on device cuda:0 (10.1/79.2 GiB) on startup is less than desired "
        "GPU memory utilization (0.9, 71.2 GiB). Decrease",
        LineMeaning.SIZING_ERROR,
    ),
    (
        "ValueError: Available memory on node 0 (3.1/23.2 GiB) on startup is less than desired "
        "CPU memory utilization (0.9, 20 GiB).",
        LineMeaning.SIZING_ERROR,
    ),
    ("ValueError: No available memory for the cache blocks. Try", LineMeaning.SIZING_ERROR),
    (
        "ValueError: To serve at least one request with the model's max seq len (131072), (16.0 "
        "GiB KV cache is needed, which is larger than the available KV cache memory (2.1 GiB).",
        LineMeaning.SIZING_ERROR,
    ),
    (
        # To 0.31.
        "ValueError: To serve at least one request with the models's max seq len (204800), (48.44 "
        "GiB KV cache is needed, which is larger than the available KV cache memory (24.85 GiB).",
        LineMeaning.SIZING_ERROR,
    ),
    (
        "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens "
        "that can be stored in KV cache (22256). Try increasing `gpu_memory_utilization`",
        LineMeaning.SIZING_ERROR,
    ),
    (
        "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62",
        LineMeaning.CUDA_OOM,
    ),
    ("RuntimeError: CUDA driver error: out of memory", LineMeaning.CUDA_OOM),
    ("INFO [scheduler.py:2756] setting pause state to PAUSED_ALL", LineMeaning.PAUSED),
    ("INFO [scheduler.py:2756] setting pause state to PAUSED_NEW", LineMeaning.RESUMED),
    ("INFO [scheduler.py:2756] setting pause state to UNPAUSED", LineMeaning.RESUMED),
    ("RuntimeError: Triton Error [CUDA]: out of memory", LineMeaning.CUDA_OOM),
    ("ncclUnhandledCudaError: Last error: Cuda failure 2 'out of memory'", LineMeaning.CUDA_OOM),
    (
        "CUDA Error: an illegal memory access was encountered at /w/csrc/cumem_allocator.cpp:62",
        LineMeaning.GPU_FAULT,
    ),
    (
        "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered",
        LineMeaning.GPU_FAULT,
    ),
    ("RuntimeError: CUDA driver error: unspecified launch failure", LineMeaning.GPU_FAULT),
    ("NCCL WARN Cuda failure 'unspecified launch failure'", LineMeaning.GPU_FAULT),
    ("NCCL WARN Cuda failure 719 'unspecified launch failure'", LineMeaning.GPU_FAULT),
    ("RuntimeError: CUDA error: unspecified launch failure", LineMeaning.GPU_FAULT),
    ("RuntimeError: CUDA error: an illegal memory access was enc", LineMeaning.GPU_FAULT),
    ("torch.AcceleratorError: CUDA error: uncorrectable ECC error", LineMeaning.GPU_FAULT),
    ("RuntimeError: HIP error: unspecified launch failure", LineMeaning.GPU_FAULT),
    ("ERROR [core.py:1510] EngineCore failed to start.", LineMeaning.START_FAILED),
    (
        "RuntimeError: Engine process failed to start. See stack trace for the root cause.",
        LineMeaning.START_FAILED,
    ),
    ("TimeoutError: RPC call to execute_model timed out.", LineMeaning.HANG),
    ("ERROR [core.py:1512] EngineCore encountered a fatal error.", LineMeaning.DEAD),
    ("[shutdown] MPClient: engine core exited unexpectedly; starting", LineMeaning.DEAD),
    ("Engine core proc EngineCore_0 died unexpectedly, shutting down client.", LineMeaning.DEAD),
    ("ERROR [core.py:387] EngineCore hit an exception: Traceback (most", LineMeaning.DEAD),
    (
        "CRITICAL [core_client.py:361] Got fatal signal from worker processes, shutting down. See "
        "stack trace above for root cause issue.",
        LineMeaning.DEAD,
    ),
    (
        "CRITICAL [multiproc_executor.py:49] MulitprocExecutor got fatal signal from worker "
        "processes, shutting down. See stack trace above for root cause issue.",
        LineMeaning.DEAD,
    ),
    ("ERROR [async_llm.py:906] AsyncLLM output_handler failed.", LineMeaning.DEAD),
    (
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack "
        "trace (above) for the root cause.",
        LineMeaning.DEAD,
    ),
    ("INFO [launcher.py:254] [shutdown] API server: shutdown triggered", LineMeaning.STOPPING),
    ("INFO [launcher.py:60] Shutting down FastAPI HTTP server.", LineMeaning.STOPPING),
    (
        "(APIServer pid=9) INFO 11-21 04:34:41 [entrypoints/launchers/launcher.py:254] [shutdown] "
        "API server: shutdown triggered",
        LineMeaning.STOPPING,
    ),
    (
        '{"asctime": "2026-11-21 04:34:41", "levelname": "INFO", "name": "vllm.entrypoints", '
        '"process": 9, "message": "[shutdown] API server: shutdown triggered"}',
        LineMeaning.STOPPING,
    ),
    (
        "INFO 11-21 04:34:41 [launcher.py:304] [shutdown] API server: shutting down FastAPI HTTP "
        "server",
        LineMeaning.STOPPING,
    ),
    (
        # As JSON without spaces, and in formats that an operator configured.
        '{"levelname":"INFO","message":"[shutdown] API server: shutdown triggered"}',
        LineMeaning.STOPPING,
    ),
    (
        "vllm.entrypoints.launchers.launcher INFO [shutdown] API server: shutdown triggered",
        LineMeaning.STOPPING,
    ),
    (
        "2026-11-21 04:34:41,123 [launcher.py:254] INFO: Shutting down FastAPI HTTP server.",
        LineMeaning.STOPPING,
    ),
    ("04:34:41 [launcher.py:254] [shutdown] API server: shutdown triggered", LineMeaning.STOPPING),
    ("vllm.v1.core.sched.scheduler INFO setting pause state to PAUSED_ALL", LineMeaning.PAUSED),
    (
        # Logged again by a program that runs the engine.
        "ERROR [replica.py:12] (EngineCore pid=9) ERROR 11-21 [core.py:710] EngineCore encountered "
        "a fatal error.",
        LineMeaning.DEAD,
    ),
    (
        "INFO [replica.py:12] (APIServer pid=9) INFO 11-21 04:34:41 [launcher.py:254] [shutdown] "
        "API server: shutdown triggered",
        LineMeaning.STOPPING,
    ),
    (
        "(EngineCore pid=9) INFO 11-21 15:58:01 [v1/core/sched/scheduler.py:2756] setting pause "
        "state to PAUSED_ALL",
        LineMeaning.PAUSED,
    ),
    ("INFO:     Waiting for application shutdown.", LineMeaning.FRONT_ENDED),
    ("INFO:     Application shutdown complete.", LineMeaning.FRONT_ENDED),
    ("ERROR Dumping scheduler stats: SchedulerStats(num_running", LineMeaning.LAST_STATS),
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
