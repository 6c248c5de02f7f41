"""The engines this agent can read: a new one is a dialect, a line here and a `kind` setting."""

from agent.catalog.engines.dialect import Dialect, Spelling
from agent.catalog.engines.llamacpp import LLAMACPP
from agent.catalog.engines.sglang import SGLANG
from agent.catalog.engines.tgi import TGI
from agent.catalog.engines.trtllm import TRTLLM
from agent.catalog.engines.vllm import VLLM

DIALECTS: dict[str, Dialect] = {d.engine: d for d in (VLLM, SGLANG, TGI, TRTLLM, LLAMACPP)}

# The engines that load the agent's plugin, by dialect. Only vLLM sends spans that the agent reads.
PLUGIN_HOSTS = {VLLM.engine: "vLLM", SGLANG.engine: "SGLang"}

__all__ = ["DIALECTS", "PLUGIN_HOSTS", "Dialect", "Spelling"]
