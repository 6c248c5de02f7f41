"""Our FLOPs and bytes beside the counters of a vLLM that estimates its work.

vLLM estimates by formulas over each scheduled step (vllm/v1/metrics/perf.py of release 0.32, here
for a dense model on one GPU). They are rebuilt here to the last FLOP and byte; where ours differ,
the difference is a term with a name. Two of the terms are in no documentation of the release:

- The scheduler makes one more step when the last request has ended, to tell the workers so
  (EngineCore.step). It computes nothing, and the estimate has it read all weights.
- A chunk of a prompt that is not its last one has no output. A step of such chunks alone is in the
  estimate, but not in `vllm:iteration_tokens_total`, by which steps are counted on the page.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Self

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from agent.analysis.physics import (
    Coefficients,
    coefficients,
    decode_flops,
    decode_kv_bytes,
    kv_bytes_per_token,
    prefill_flops,
    prefill_kv_bytes,
    step_weight_bytes,
)
from agent.records.model import ModelShape
from agent.sources.model_config.reading import read_model
from tests.real_engine.watching import LIMITS, STEP_TOKENS
from tests.real_parts.bench import BenchmarkResult, BenchmarkRunner, Load
from tests.real_parts.metric_pages import total
from tests.real_parts.tiny_model import tiny_model
from tests.real_parts.vllm import ANSWER_WITHIN_S, Vllm
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(1500)


# The engine's formula


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


# What is asked

LOADS = (
    Load(name="apart", requests_per_s=8, prompts=12),
    Load(name="at-once", requests_per_s=inf, prompts=24, seed=2),
)
BENCHMARK = "the benchmark"
COUNTED_WITHIN_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request made by hand: its prompt as token ids, and its answers."""

    prompt: list[int]
    output: int
    answers: int = 1


def numbers(start: int, count: int) -> list[int]:
    """Token ids, of which no two starts share a block of the cache."""
    return [10 + (start + 7 * position) % 2000 for position in range(count)]


# One after the other, as some find in the cache what others left there, in blocks of 128 tokens.
ASKED = {
    "a prompt in one step": Asked(prompt=numbers(1, 200), output=6),
    "one output token": Asked(prompt=numbers(2, 150), output=1),
    "a prompt in three steps": Asked(prompt=numbers(3, 1300), output=4),
    "the same prompt again": Asked(prompt=numbers(3, 1300), output=4),
    "two steps after a cached prefix": Asked(prompt=numbers(3, 300) + numbers(4, 700), output=3),
    "one prompt token that is not cached": Asked(prompt=numbers(3, 513), output=3),
    "two answers to one prompt": Asked(prompt=numbers(5, 600), output=3, answers=2),
}
CACHED = {
    "the same prompt again": 1280,
    "two steps after a cached prefix": 256,
    "one prompt token that is not cached": 512,
    "two answers to one prompt": 512,
}
EARLIER_CHUNKS = {
    "a prompt in three steps": 2,
    "two steps after a cached prefix": 1,
    "two answers to one prompt": 1,
}


WARM_UP = Asked(prompt=numbers(1003, 20), output=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What was asked of the engine, what it counted, and what its formula says."""

    requests: tuple[Request, ...]
    counted: Counted
    formula: EngineFormula

    @property
    def prompt_chunks(self) -> list[list[Piece]]:
        """The prompts' pieces, by request."""
        return [chunks(request, STEP_TOKENS) for request in self.requests]

    @property
    def pieces(self) -> list[Piece]:
        """All pieces of all requests."""
        return [piece for request in self.requests for piece in pieces(request, STEP_TOKENS)]

    @property
    def earlier_chunks(self) -> list[Piece]:
        """The pieces of prompts that were not the last of their prompt."""
        return [piece for of_one in self.prompt_chunks for piece in of_one[:-1]]

    @property
    def weight_reads(self) -> float:
        """How often the weights were read, by the bytes that nothing else accounts for."""
        moved = self.formula.moved(self.pieces)
        left = self.counted.read_bytes - moved.kv_read - moved.activations_read
        return left / self.formula.weight_bytes

    @property
    def steps_without_output(self) -> float:
        """How many of the steps that read weights gave no output."""
        return self.weight_reads - self.counted.steps_with_output

    @property
    def has_ended(self) -> bool:
        """Whether the engine counted all output, and a step that had nothing more to compute."""
        tokens = sum(request.computed + 1 for request in self.requests)
        all_out = self.counted.step_tokens == tokens
        return all_out and self.steps_without_output > len(self.earlier_chunks)

    def our_flops(self, ours: Coefficients) -> int:
        """What we say of the same requests."""
        return sum(
            prefill_flops(ours, request.prompt, request.cached)
            + decode_flops(ours, request.prompt, request.output)
            for request in self.requests
        )

    def our_cache_bytes(self, ours: Coefficients) -> float:
        """What we say of the same requests."""
        return sum(
            prefill_kv_bytes(ours, request.prompt - request.cached, request.cached)
            + decode_kv_bytes(ours, request.prompt, request.output)
            for request in self.requests
        )


def case_of(asked: list[Request], engine: Vllm, before: Counted, formula: EngineFormula) -> Case:
    """The case, once the engine has fallen idle and counted the step in which it did."""

    def look() -> Case | None:
        counted = Counted.on(engine.exposition()).since(before)
        case = Case(requests=tuple(asked), counted=counted, formula=formula)
        return case if case.has_ended else None

    case = eventually(look, within_s=COUNTED_WITHIN_S, what="the counters of what was asked")
    assert case is not None
    return case


def asked_by_hand(engine: Vllm, asked: Asked) -> list[Request]:
    """Ask, and return what was computed by the engine's own account."""
    answer = requests.post(
        f"{engine.url}/v1/completions",
        json={
            "model": engine.model,
            "prompt": asked.prompt,
            "max_tokens": asked.output,
            "n": asked.answers,
            "ignore_eos": True,
        },
        timeout=ANSWER_WITHIN_S,
    )
    answer.raise_for_status()
    usage = answer.json()["usage"]
    found = Request(
        prompt=usage["prompt_tokens"],
        cached=usage["prompt_tokens_details"]["cached_tokens"],
        output=usage["completion_tokens"] // asked.answers,
    )
    # One of several answers computes the prompt, and the others find it in the cache.
    return [replace(found, cached=0)] * (asked.answers - 1) + [found]


def benched(results: list[BenchmarkResult]) -> list[Request]:
    """The requests of the benchmark's own file; none of its prompts fills a block of the cache."""
    return [
        Request(prompt=request.input_tokens, cached=0, output=request.output_tokens)
        for result in results
        for request in result.requests
    ]


@pytest.fixture(scope="module")
def model() -> ModelShape:
    """The tiny model, read from its config.json as the agent reads it."""
    return read_model(tiny_model())


@pytest.fixture(scope="module")
def ours(model: ModelShape) -> Coefficients:
    """The tiny model in the numbers of our formulas."""
    return coefficients(model)


@pytest.fixture(scope="module")
def formula() -> EngineFormula:
    """The engine's formula for the tiny model."""
    return EngineFormula.of_model(tiny_model())


@pytest.fixture(scope="module")
def cases(
    engine: Vllm,
    benchmark: BenchmarkRunner,
    formula: EngineFormula,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Case]:
    """Every case, asked in turn, of an engine that has begun to estimate."""
    before = Counted.on(engine.exposition())
    case_of(asked_by_hand(engine, WARM_UP), engine, before, formula)
    done: dict[str, Case] = {}
    for name, asked in ASKED.items():
        before = Counted.on(engine.exposition())
        done[name] = case_of(asked_by_hand(engine, asked), engine, before, formula)
    before = Counted.on(engine.exposition())
    results = benchmark.run(engine, LOADS, LIMITS, tmp_path_factory.mktemp("physics"))
    done[BENCHMARK] = case_of(benched(results), engine, before, formula)
    return done


@pytest.fixture(params=[*ASKED, BENCHMARK])
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    """One case after the other."""
    return cases[request.param]


def test_the_requests_ran_as_they_were_meant_to(cases: dict[str, Case]) -> None:
    cached = {name: case.counted.cached_tokens for name, case in cases.items()}
    assert cached == {name: CACHED.get(name, 0) for name in cases}
    earlier_chunks = {name: len(case.earlier_chunks) for name, case in cases.items()}
    assert earlier_chunks == {name: EARLIER_CHUNKS.get(name, 0) for name in cases}


# The engine's counters, rebuilt


def test_the_engines_flops_are_its_formula_over_the_requests(case: Case) -> None:
    assert case.counted.flops == case.formula.flops(case.pieces).total


def test_the_bytes_that_the_engine_writes_are_its_formula_over_the_requests(case: Case) -> None:
    moved = case.formula.moved(case.pieces)
    assert case.counted.written_bytes == moved.kv_written + moved.activations_written


def test_the_bytes_that_the_engine_reads_are_its_formula_and_whole_reads_of_the_weights(
    case: Case,
) -> None:
    assert case.weight_reads.is_integer()


@pytest.mark.parametrize("name", list(ASKED))
def test_a_request_alone_ends_in_one_step_that_computes_nothing(
    name: str, cases: dict[str, Case]
) -> None:
    case = cases[name]
    assert case.steps_without_output - len(case.earlier_chunks) == 1


def test_the_benchmark_leaves_the_engine_idle_no_more_often_than_it_has_requests(
    cases: dict[str, Case],
) -> None:
    case = cases[BENCHMARK]
    assert 1 <= case.steps_without_output <= len(case.requests)


# Ours beside them


def test_our_matrices_attention_and_cache_cost_what_the_engines_do(
    model: ModelShape, ours: Coefficients, formula: EngineFormula
) -> None:
    assert ours.linear_parameters == formula.layer_weights
    assert 2 * ours.head_parameters == formula.logits_flops
    (attention,) = ours.attentions
    assert attention.layers * attention.prefill_flops_per_pair == formula.pair_flops
    assert attention.layers * attention.decode_flops_per_pair == formula.pair_flops
    assert kv_bytes_per_token(ours) == formula.kv_token_bytes
    assert step_weight_bytes(model, tokens=1) == formula.weight_bytes


def test_the_engine_makes_room_for_the_tokens_that_our_bytes_allow(
    engine: Vllm, ours: Coefficients
) -> None:
    room = CacheSize.on(engine.exposition())
    assert room.tokens * kv_bytes_per_token(ours) == room.size_bytes


def test_our_flops_lack_masked_pairs_and_the_logits_of_earlier_chunks_alone(
    case: Case, ours: Coefficients
) -> None:
    """The engine has each token of a chunk look at the whole chunk, and each chunk end in logits.

    Of the pairs within a chunk of n tokens the causal mask leaves out n (n - 1) / 2. The logits of
    all chunks but the last are thrown away; ours are those that a token is drawn from.
    """
    masked_pairs = sum(piece.tokens * (piece.tokens - 1) // 2 for piece in case.pieces)
    masked = case.formula.pair_flops * masked_pairs
    thrown_away = case.formula.logits_flops * len(case.earlier_chunks)
    assert case.counted.flops - case.our_flops(ours) == masked + thrown_away


def test_our_cache_bytes_lack_what_later_chunks_read_again_alone(
    case: Case, ours: Coefficients
) -> None:
    """Ours take a prompt as one chunk; the engine has each chunk read all before it, and itself."""
    moved = case.formula.moved(case.pieces)
    read_again = case.formula.kv_token_bytes * sum(piece.context for piece in case.earlier_chunks)
    assert moved.kv_read + moved.kv_written - case.our_cache_bytes(ours) == read_again


def test_our_bytes_lack_activations_chunks_and_steps_without_output_alone(
    case: Case, model: ModelShape, ours: Coefficients
) -> None:
    """Ours have the weights of the steps that gave output, as no other can be seen on the page.

    Activations are taken to stay on the chip.
    """
    weights = step_weight_bytes(model, tokens=case.counted.step_tokens)
    our_bytes = case.our_cache_bytes(ours) + case.counted.steps_with_output * weights
    moved = case.formula.moved(case.pieces)
    activations = moved.activations_read + moved.activations_written
    read_again = case.formula.kv_token_bytes * sum(piece.context for piece in case.earlier_chunks)
    unseen = case.steps_without_output * weights
    counted_bytes = case.counted.read_bytes + case.counted.written_bytes
    assert counted_bytes - our_bytes == activations + read_again + unseen
