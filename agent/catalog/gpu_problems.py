"""The words in which sources say why a GPU that they read before cannot be read now."""

from agent.catalog.reasons import INTERNAL, FetchFailed, PageFault

# The GPU is gone or broken; a source that sees none at all says `no_gpu` of each that it knew.
LOST = frozenset(
    {"gpu_lost", "gpu_reset_required", "gpu_not_found", "gpu_missing", "gpu_silent", "no_gpu"}
    | {"gpu_unopened"}  # unlike others beside it
)

# The driver holds a call: it hangs, or it is slow.
HELD = frozenset({"not_answering"})

# The agent cannot see any GPU, broken or not: NVML is not there, or not for it, as in a container
# that lost its devices (`nvml_unknown_error`), the exporter cannot be read or stands still, or the
# agent has an error of its own.
UNSEEN = (
    "no_package",
    "wrong_package",
    "no_library",
    "no_driver",
    "no_permission",
    "driver_lost",
    "driver_mismatch",
    "nvml_unknown_error",
    "init_failed",
    "exporter_stale",
    INTERNAL,
    *(f"exporter_{reason}" for reason in (*FetchFailed, *PageFault)),
)
