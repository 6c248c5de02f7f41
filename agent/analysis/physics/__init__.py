"""FLOPs and bytes of a model's work, and the roofline of GPUs.

FLOPs and bytes are lower bounds from the model's shape, without what kernels waste. The formulas
are those of vLLM's estimator (vllm/v1/metrics/perf.py, 0.33) with three changes: causal scores,
expected instead of possible experts, and KV heads as they are replicated.
"""
