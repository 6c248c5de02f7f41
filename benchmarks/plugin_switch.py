"""The plugin's stat logger with a switch, for the benchmark: it reports while a file holds a 1.

An engine loads a copy of this module.
"""

import mmap
import os
from typing import Any

from goodput_agent_vllm.logger import GoodputStatLogger


class SwitchedStatLogger(GoodputStatLogger):
    """Reports steps while it is switched on."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        super().__init__(vllm_config, engine_index)
        opened = os.open(os.environ["GOODPUT_BENCHMARK_SWITCH"], os.O_RDONLY)
        self._switch = mmap.mmap(opened, 1, prot=mmap.PROT_READ)

    def record(self, *counts: Any, **named: Any) -> None:
        """Report a step, or nothing."""
        if self._switch[0]:
            super().record(*counts, **named)
