"""vLLM's own estimate of its work, recomputed from a request's tokens, and an agent beside it.

The formula is after vllm/v1/metrics/perf.py of release 0.32, for a dense model on one GPU, in the
terms in which ours can differ from it. The agent has a model, a price and the stand-in driver's
GPU.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from tests.real_engine.watching import ENGINE, Row
from tests.real_parts.agent_process import AgentApi, AgentPorts, HastyAgent
from tests.real_parts.metric_pages import total
from tests.real_parts.tiny_model import tiny_model
from tests.real_parts.waiting import eventually
from tests.sources.nvml.fake_driver import build


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The tokens of one answer to one prompt; `cached` of the prompt were not computed."""

    prompt: int
    cached: int
    output: int

    @property
    def computed(self) -> int:
        """Tokens that went through the model: the last output token never does."""
        return self.prompt - self.cached + self.output - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step computes of one request: so many tokens, the last at the end of `context`."""

    tokens: int
    context: int


def chunks(request: Request, longest: int) -> list[Piece]:
    """The pieces of a prompt that has the engine to itself, in steps of so many tokens."""
    ends = [*range(request.cached + longest, request.prompt, longest), request.prompt]
    starts = [request.cached, *ends]
    return [Piece(end - start, end) for start, end in zip(starts, ends, strict=False)]


def pieces(request: Request, longest: int) -> Iterator[Piece]:
    """All pieces of a request: a step for each output token after the first follows the prompt."""
    yield from chunks(request, longest)
    for output in range(1, request.output):
        yield Piece(1, request.prompt + output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Floating-point operations by the matrices and the attention that they are for."""

    layers: int
    scores: int
    logits: int

    @property
    def total(self) -> int:
        """The sum that the counter has."""
        return self.layers + self.scores + self.logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes read and written, those of weights apart, which belong to a step and not a request."""

    kv_read: int
    kv_written: int
    activations_read: int
    activations_written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFormula:
    """The formula over the keys of a config.json, and bytes per value."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    # Weights, activations and the cache are bfloat16, so that the engine's three widths are one.
    width: int = 2

    @classmethod
    def of_model(cls, folder: Path) -> Self:
        """The formula for the model in this folder."""
        config = json.loads((folder / "config.json").read_text())
        return cls(
            **{field.name: config[field.name] for field in fields(cls) if field.name in config}
        )

    @property
    def layer_weights(self) -> int:
        """The weights of all layers' matrices."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        attention = self.hidden_size * heads * self.head_dim
        forward = 3 * self.hidden_size * self.intermediate_size
        return self.num_hidden_layers * (attention + forward)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that each step reads, even one that computes nothing."""
        return self.width * (self.layer_weights + self.hidden_size * self.vocab_size)

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        values = 2 * self.num_key_value_heads * self.head_dim
        return self.num_hidden_layers * values * self.width

    @property
    def pair_flops(self) -> int:
        """FLOPs of one query token and one token of its context in all layers."""
        return 4 * self.num_attention_heads * self.head_dim * self.num_hidden_layers

    @property
    def logits_flops(self) -> int:
        """FLOPs of one row of logits."""
        return 2 * self.hidden_size * self.vocab_size

    def flops(self, work: Iterable[Piece]) -> Flops:
        """All tokens of a piece are taken to see its whole context, and each piece has logits."""
        done = tuple(work)
        return Flops(
            layers=2 * self.layer_weights * sum(piece.tokens for piece in done),
            scores=self.pair_flops * sum(piece.tokens * piece.context for piece in done),
            logits=self.logits_flops * len(done),
        )

    def moved(self, work: Iterable[Piece]) -> Bytes:
        """Each piece reads the keys and values of its whole context, its own tokens included."""
        done = tuple(work)
        tokens = sum(piece.tokens for piece in done)
        layers, width = self.num_hidden_layers, self.width
        hidden, forward = self.hidden_size, self.intermediate_size
        query = self.num_attention_heads * self.head_dim
        key_and_value = 2 * self.num_key_value_heads * self.head_dim
        # Into the projections, the attention, its output matrix; then gate and up, product, down.
        read = hidden + query + query + hidden + 2 * forward + forward
        # Out of the same in the same order, but for the attention, whose output is not counted.
        written = query + key_and_value + hidden + 2 * forward + forward + hidden
        return Bytes(
            kv_read=self.kv_token_bytes * sum(piece.context for piece in done),
            kv_written=self.kv_token_bytes * tokens,
            activations_read=width * (layers * tokens * read + len(done) * hidden),
            activations_written=width * (layers * tokens * written + len(done) * self.vocab_size),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Counters of an engine's exposition at one time, or their growth between two."""

    flops: float
    read_bytes: float
    written_bytes: float
    steps_with_output: float
    step_tokens: float
    cached_tokens: float

    @classmethod
    def on(cls, page: str) -> Self:
        """The counters of this exposition."""
        return cls(
            flops=total(page, "vllm:estimated_flops_per_gpu_total"),
            read_bytes=total(page, "vllm:estimated_read_bytes_per_gpu_total"),
            written_bytes=total(page, "vllm:estimated_write_bytes_per_gpu_total"),
            steps_with_output=total(page, "vllm:iteration_tokens_total_count"),
            step_tokens=total(page, "vllm:iteration_tokens_total_sum"),
            cached_tokens=total(page, "vllm:prompt_tokens_cached_total"),
        )

    def since(self, before: "Counted") -> "Counted":
        """The growth since `before`."""
        names = [field.name for field in fields(self)]
        return Counted(**{name: getattr(self, name) - getattr(before, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """The KV cache that an engine made at its start."""

    tokens: int
    size_bytes: int

    @classmethod
    def on(cls, page: str) -> Self:
        """The size from the labels of this exposition."""
        (labels,) = (
            sample.labels
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == "vllm:cache_config_info"
        )
        return cls(
            tokens=int(labels["num_gpu_blocks"]) * int(labels["block_size"]),
            size_bytes=int(labels["kv_cache_memory_bytes"]),
        )


GPU_HOUR_USD = 3.6
TENSOR_ACTIVE, MEMORY_ACTIVE, CLOCK_RATIO = 0.3, 0.4, 0.5
# A minute of this agent has ten seconds; then its rows must come.
COUNTED_WITHIN_S = 240.0

# Numbers of GPM: activity of the tensor cores, of the memory. The clock is at most 1980 MHz.
SCRIPT = (
    f"activity 0 5 {100 * TENSOR_ACTIVE:.0f}",
    f"activity 0 10 {100 * MEMORY_ACTIVE:.0f}",
    f"set 0 sm_clock {1980 * CLOCK_RATIO:.0f}",
)
DRIVER = "driver"


@contextmanager
def watching(
    folder: Path,
    ports: AgentPorts,
    engine_url: str,
    proxy: int,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[AgentApi]:
    """The agent while it runs; on the port `proxy` it passes requests on to the engine.

    `more` has settings of sections that are added to its own. The file `driver` of the folder takes
    lines for the GPU.
    """
    os.mkfifo(folder / DRIVER)
    build(folder)
    # Scripted before the agent reads the GPU, so that no sample is of an idle one.
    environment = {
        "LD_LIBRARY_PATH": str(folder),
        "STANDIN_SCRIPT": "\n".join(SCRIPT),
        "STANDIN_PIPE": str(folder / DRIVER),
    }
    configured = settings(engine_url, proxy)
    for name, section in more.items():
        own = configured.get(name, type(section)())
        configured[name] = own + section if isinstance(section, list) else {**own, **section}
    with HastyAgent.with_settings(folder, ports, configured, environment) as agent:
        yield agent.api


def settings(engine_url: str, proxy: int) -> dict[str, Any]:
    """The agent's settings for the engine."""
    engine = {
        "name": ENGINE,
        "url": engine_url,
        "scrape_interval": "1s",
        "model_config": str(tiny_model()),
        "gpus": [0],
        "parallelism": {"tensor": 1},
        "gpu_hour_usd": GPU_HOUR_USD,
    }
    return {
        "engines": [engine],
        "proxy": {"listen": f"127.0.0.1:{proxy}", "engine": ENGINE, "join_wait": "1s"},
    }


def priced(rows: Iterable[Row]) -> set[str]:
    """The ids of those of these rows that have a price."""
    return {row["request_id"] for row in rows if row["priced_at"]}


def counted(api: AgentApi, ids: set[str]) -> tuple[list[Row], Mapping[str, Any]]:
    """All rows and the summary of the same minutes, once these requests are priced to their end.

    While the row of one is still to come, its minute has more work by the engine than by the rows.
    """

    def read() -> tuple[list[Row], Mapping[str, Any]] | None:
        # A summary is much work for an agent that is still to price these.
        if not ids <= priced(api.requests()):
            return None
        before, rows, after = api.summary(window="1h"), api.requests(), api.summary(window="1h")
        same = before["cost"] == after["cost"] and before["cost"] is not None
        return (rows, after) if same and ids <= priced(rows) else None

    found = eventually(read, within_s=COUNTED_WITHIN_S, what=f"counted minutes of {sorted(ids)}")
    assert found is not None
    return found
