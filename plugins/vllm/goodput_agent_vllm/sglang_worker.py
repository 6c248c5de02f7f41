"""What each of SGLang's tokenizer processes imports in place of SGLang's application."""

from sglang.srt.entrypoints.http_server import app  # type: ignore[import-not-found]
from sglang.srt.plugins.hook_registry import HookRegistry  # type: ignore[import-not-found]

from goodput_agent_vllm.sglang import watch

watch(app)
HookRegistry.apply_hooks()

__all__ = ["app"]
