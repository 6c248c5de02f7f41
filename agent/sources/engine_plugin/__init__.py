"""Receives what `goodput-agent-vllm`, a plugin of vLLM, sends of steps and ended requests."""
