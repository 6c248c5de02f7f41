"""The phases of an engine's start, and the spans of vLLM that show them.

Names are those of `@instrument(span_name=...)` and `instrument_manual` in vLLM 0.32.
"""

from collections.abc import Mapping

# Before the first span, and after the last one.
BOOT, FRONT = "boot", "front"

# In the order of a start, as tables show them.
START_PHASES: Mapping[str, str] = {
    BOOT: "the process began, imported its code and read its configuration",
    "processes": "core, workers and their connections",
    "device": "devices were opened, and workers connected to each other",
    "model": "the model was built, without its weights",
    "download": "weights were fetched from the hub",
    "weights": "weights were read",
    "profiling": "memory was measured, and the KV cache laid out",
    "kv_cache": "the KV cache was allocated",
    "compile": "the model was compiled",
    "warmup": "kernels ran for the first time",
    "capture": "CUDA graphs were captured",
    FRONT: "the front opened, up to the first scrape that it answered",
}

PHASE_OF_SPAN: Mapping[str, str] = {
    "Overall Loading": "processes",
    "AsyncMPClient init": "processes",
    "SyncMPClient init": "processes",
    "EngineCoreProc init": "processes",
    "Executor init": "processes",
    "Worker init": "processes",
    "Init device": "device",
    "Loading (GPU)": "model",
    "Loading (CPU)": "model",
    "Load model": "model",
    "Initialize model": "model",
    "Download weights - HF": "download",
    "Load weights": "weights",
    "Prepare model": "profiling",
    "Allocate KV cache": "kv_cache",
    "Compile graph": "compile",
    "Inductor compilation": "compile",
    "Dynamo bytecode transform": "compile",
    "Warmup (GPU)": "warmup",
    "Warmup (CPU)": "warmup",
    "DeepGemm warmup": "warmup",
    "MiniMax M3 MSA warmup": "warmup",
    "CuTeDSL warmup": "warmup",
    "Capture model": "capture",
}
