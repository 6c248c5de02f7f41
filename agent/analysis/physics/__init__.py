"""How many FLOPs and bytes a model's work takes, and how close a GPU comes to its best.

FLOPs and bytes are lower bounds from the model's shape: what the mathematics needs, not what
kernels waste. After the formulas of vLLM's estimator (vllm/v1/metrics/perf.py, 0.33), counted
causally, with expected instead of possible experts, and KV heads as they are replicated.
"""
