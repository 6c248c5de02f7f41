"""Benchmarks: every figure is a ratio or a bound measured in the same run."""

import sys
from pathlib import Path

# The plugin's package, as tests have it: see `pythonpath` in pyproject.toml.
sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "vllm"))
