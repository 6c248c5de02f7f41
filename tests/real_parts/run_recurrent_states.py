"""Counts the FLOPs of recurrent layers' states with torch's counter, on transformers' own code.

The engine's Python runs this script. All tensors are on the meta device, without values. Engines
compute a prompt chunk by chunk with the same algorithms. Prints one JSON object.
"""

import json
import sys
from typing import Any

import torch  # type: ignore[import-not-found]
from torch.utils.flop_counter import FlopCounterMode  # type: ignore[import-not-found]
from transformers import AutoConfig  # type: ignore[import-not-found]
from transformers.models.nemotron_h import (  # type: ignore[import-not-found]
    modeling_nemotron_h,
)
from transformers.models.qwen3_next import (  # type: ignore[import-not-found]
    modeling_qwen3_next,
)


def main() -> None:
    """Reads the lengths of chunks; prints the FLOPs of one layer over one chunk of each length."""
    chunks = json.load(sys.stdin)["chunks"]
    with torch.device("meta"):
        found = {
            "qwen3_next": [counted(delta_net, "qwen3_next", tokens) for tokens in chunks],
            "nemotron_h": [counted(mamba, "nemotron_h", tokens) for tokens in chunks],
        }
    sys.stdout.write(json.dumps(found))


def counted(layer: Any, model_type: str, tokens: int) -> int:
    """The FLOPs of matrix products; torch's counter knows no others."""
    config = AutoConfig.for_model(model_type)
    with FlopCounterMode(display=False) as counter:
        layer(config, tokens)
    return int(counter.get_total_flops())


def delta_net(config: Any, tokens: int) -> None:
    """The gated delta rule over one chunk, after a state."""
    heads, rows = config.linear_num_value_heads, config.linear_value_head_dim
    columns = config.linear_key_head_dim
    modeling_qwen3_next.torch_chunk_gated_delta_rule(
        query=torch.empty(1, tokens, heads, columns),
        key=torch.empty(1, tokens, heads, columns),
        value=torch.empty(1, tokens, heads, rows),
        g=torch.empty(1, tokens, heads),
        beta=torch.empty(1, tokens, heads),
        chunk_size=tokens,
        initial_state=torch.empty(1, heads, columns, rows),
        output_final_state=True,
    )


def mamba(config: Any, tokens: int) -> None:
    """The scan of Mamba 2 over one chunk, after a state."""
    heads, rows = config.mamba_num_heads, config.mamba_head_dim
    columns = config.ssm_state_size
    modeling_nemotron_h.mamba2_chunk_scan(
        torch.empty(1, tokens, heads, rows),
        torch.empty(1, tokens, heads),
        torch.empty(heads),
        torch.empty(1, tokens, config.n_groups, columns),
        torch.empty(1, tokens, config.n_groups, columns),
        chunk_size=tokens,
        initial_states=torch.empty(1, heads, rows, columns),
        return_final_states=True,
    )


if __name__ == "__main__":
    main()
