"""Reasons why a GPU that was read before cannot be read now."""

from agent.catalog.reasons import INTERNAL, ExpositionFault, FetchFailed

GPU_MISSING = "gpu_missing"
GPU_SILENT = "gpu_silent"
GPU_UNOPENED = "gpu_unopened"
# The source works and finds no GPU.
NO_GPU = "no_gpu"
NOT_ANSWERING = "not_answering"
INIT_FAILED = "init_failed"
EXPORTER_STALE = "exporter_stale"

# The GPU is gone or broken. `gpu_unopened` is a GPU that cannot be opened beside GPUs that can.
LOST = frozenset(
    {"gpu_lost", "gpu_reset_required", "gpu_not_found", GPU_MISSING, GPU_SILENT, NO_GPU}
    | {GPU_UNOPENED}
)

# The driver does not return from a call: it hangs, or it is slow.
HELD = frozenset({NOT_ANSWERING})

# The agent cannot see any GPU, broken or not. NVML is absent or out of reach, as in a container
# that lost its devices (`nvml_unknown_error`); the exporter cannot be read, or its values do not
# change; or the agent failed.
UNSEEN = (
    "no_package",
    "wrong_package",
    "no_library",
    "no_driver",
    "no_permission",
    "driver_lost",
    "driver_mismatch",
    "nvml_unknown_error",
    INIT_FAILED,
    EXPORTER_STALE,
    INTERNAL,
    *(f"exporter_{reason}" for reason in (*FetchFailed, *ExpositionFault)),
)
