"""Our FLOPs and bytes beside the counters of a vLLM that estimates its work.

vLLM estimates by formulas over each scheduled step (vllm/v1/metrics/perf.py). They are rebuilt
here to the last FLOP and byte; where ours differ, the difference is a term with a name.
Two of the terms are in no documentation of the release:

- The scheduler makes one more step when the last request has ended, to tell the workers so
  (EngineCore.step). It computes nothing, and the estimate has it read all weights.
- A chunk of a prompt that is not its last one has no output. A step of such chunks alone is in the
  estimate, but not in `vllm:iteration_tokens_total`, by which steps are counted on the page.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import fsum, inf

import pytest
import requests

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
from tests.real_engine.physics import (
    CLOCK_RATIO,
    GPU_HOUR_USD,
    MEMORY_ACTIVE,
    TENSOR_ACTIVE,
    CacheSize,
    Counted,
    EngineFormula,
    Piece,
    Request,
    chunks,
    counted,
    pieces,
    watching,
)
from tests.real_engine.watching import LIMITS, STEP_TOKENS, rows_once_there
from tests.real_parts.agent_process import AgentApi, AgentPorts
from tests.real_parts.bench import BenchmarkResult, BenchmarkRunner, Load
from tests.real_parts.ports import free_port
from tests.real_parts.tiny_model import tiny_model
from tests.real_parts.vllm import ANSWER_WITHIN_S, Vllm, span_request_id
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(1500)

LOADS = (
    Load(name="apart", requests_per_s=8, prompts=24),
    Load(name="at-once", requests_per_s=inf, prompts=32, seed=2),
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
# Prompts of no other request, sent through the agent's proxy, which reads the cached tokens.
WATCHED = {
    "watched-1": Asked(prompt=numbers(1001, 700), output=20),
    "watched-2": Asked(prompt=numbers(1001, 700), output=40),
    "watched-3": Asked(prompt=numbers(1002, 130), output=60),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What was asked of the engine, what it counted, and what its formula says."""

    requests: tuple[Request, ...]
    counted: Counted
    formula: EngineFormula
    row_ids: frozenset[str] = frozenset()

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


def asked_by_hand(
    engine: Vllm, asked: Asked, url: str | None = None, request_id: str | None = None
) -> list[Request]:
    """Ask, and return what was computed by the engine's own account."""
    answer = requests.post(
        f"{url or engine.url}/v1/completions",
        headers={} if request_id is None else {"X-Request-Id": request_id},
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
def watched(
    engine: Vllm,
    ports: AgentPorts,
    formula: EngineFormula,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[AgentApi, dict[str, Request]]]:
    """An agent beside an engine that has begun to estimate, and what was asked through it."""
    proxy, asked = free_port(), {}
    before = Counted.on(engine.exposition())
    case_of(asked_by_hand(engine, WARM_UP), engine, before, formula)
    before = Counted.on(engine.exposition())
    folder = tmp_path_factory.mktemp("watched")
    with watching(folder, ports, engine.url, proxy) as api:
        url = f"http://127.0.0.1:{proxy}"
        for name, each in WATCHED.items():
            (asked[name],) = asked_by_hand(engine, each, url, name)
        case_of([*asked.values()], engine, before, formula)
        yield api, asked
        # Spans leave in the order of requests, so that none of these comes to a later agent.
        engine.complete(request_id="last", max_tokens=2)
        rows_once_there(api, {span_request_id("last")})


@pytest.fixture(scope="module")
def cases(
    engine: Vllm,
    benchmark: BenchmarkRunner,
    formula: EngineFormula,
    watched: tuple[AgentApi, dict[str, Request]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Case]:
    """Every case, asked in turn, while the minute of what was asked before comes to its end."""
    assert watched
    done: dict[str, Case] = {}
    for name, asked in ASKED.items():
        before = Counted.on(engine.exposition())
        requests = asked_by_hand(engine, asked, request_id=name)
        case = case_of(requests, engine, before, formula)
        done[name] = replace(case, row_ids=frozenset({span_request_id(name)}))
    before = Counted.on(engine.exposition())
    results = benchmark.run(engine, LOADS, LIMITS, tmp_path_factory.mktemp("physics"))
    ids = frozenset(each.request_id for result in results for each in result.requests)
    done[BENCHMARK] = replace(case_of(benched(results), engine, before, formula), row_ids=ids)
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


# The agent beside it


def row_ids(asked: Iterable[str], cases: dict[str, Case]) -> set[str]:
    """The ids of the rows of everything that was asked while the agent watched."""
    return {*asked, *(row_id for case in cases.values() for row_id in case.row_ids)}


def test_the_agents_rows_add_up_to_the_formula_and_to_the_bill(
    watched: tuple[AgentApi, dict[str, Request]], ours: Coefficients, cases: dict[str, Case]
) -> None:
    """Over all minutes, those of the cases too."""
    api, asked = watched
    rows, summary = counted(api, row_ids(asked, cases))
    by_id = {row["request_id"]: row for row in rows if row["request_id"] in asked}
    for name, request in asked.items():
        prefill = prefill_flops(ours, request.prompt, request.cached)
        decode = decode_flops(ours, request.prompt, request.output)
        row = by_id[name]
        assert (row["vantage"], row["cached_tokens"]) == ("joined", request.cached)
        assert (row["prefill_flops"], row["decode_flops"]) == (prefill, decode)
    cost = summary["cost"]
    nobodys = cost["idle_usd"] + cost["unknown_usd"] + cost["unseen_usd"]
    assert (of_requests := fsum(row["cost_usd"] or 0.0 for row in rows)) > 0
    assert of_requests + nobodys == pytest.approx(cost["bill_usd"], rel=1e-9)
    assert cost["bill_usd"] == pytest.approx(cost["gpu_hours"] * GPU_HOUR_USD)
    assert fsum(row["gpu_hours"] or 0.0 for row in rows) == pytest.approx(
        of_requests / GPU_HOUR_USD
    )


def test_the_agent_shows_its_count_beside_the_engines_and_the_gpus(
    watched: tuple[AgentApi, dict[str, Request]], cases: dict[str, Case]
) -> None:
    """The driver's GPU is busier than this engine can make it, as if others used it."""
    api, asked = watched
    _, summary = counted(api, row_ids(asked, cases))
    sources = summary["efficiency"]["sources"]
    assert sources["engine"]["mfu"] == pytest.approx(sources["requests"]["mfu"], rel=0.1)
    assert 0 < sources["requests"]["mbu"] < sources["engine"]["mbu"], "activations are in it"
    assert sources["hardware"]["mfu"] == pytest.approx(TENSOR_ACTIVE * CLOCK_RATIO, rel=0.05)
    assert sources["hardware"]["mbu"] == pytest.approx(MEMORY_ACTIVE, rel=0.05)
    disagreements = {
        (each["figure"], each["lower"]): each
        for each in summary["efficiency"]["disagreements"]
        if each["higher"] == "hardware"
    }
    assert disagreements.keys() == {(f, s) for f in ("mfu", "mbu") for s in ("requests", "engine")}
    # Which cause comes first hangs on what was seen; tests/analysis has their order.
    causes = disagreements["mfu", "requests"]["causes"]
    assert any("other programs share the GPU" in cause for cause in causes)
