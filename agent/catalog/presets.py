"""Presets of objectives by name, in the units of the settings file.

The limits are those of service classes in operating guides for LLM inference: `interactive` and
`chat` by kind of traffic, the others by size of the model. `max_error_ratio` and
`min_output_tokens_per_s` are limits on the traffic as a whole.
"""

from collections.abc import Mapping

PRESETS: Mapping[str, Mapping[str, float]] = {
    "interactive": {"ttft_ms": 500, "tpot_ms": 30},
    "chat": {"ttft_ms": 200, "tpot_ms": 120, "max_error_ratio": 0.001},
    "7b": {"ttft_ms": 100, "min_output_tokens_per_s": 1000},
    "13b": {"ttft_ms": 200, "min_output_tokens_per_s": 500},
    "70b": {"ttft_ms": 500, "min_output_tokens_per_s": 100},
}
