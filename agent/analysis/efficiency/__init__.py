"""How well an engine used its GPUs in a window: what its requests needed, what it says itself, and
what the hardware counted.

A window is a stretch of time of one engine, a minute as a rule. What an engine did in it is told by
its samples (`observed`), what it was for by the rows of its requests (`activity`, `load`).
"""
