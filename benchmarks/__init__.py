"""Benchmarks: every figure is a ratio or a bound measured in the same run."""
