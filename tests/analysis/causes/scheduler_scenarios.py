"""Engines, traffic and factors for vLLM's own scheduler: what it is asked, and what goes wrong.

`scheduler_runs.py` runs them. All requests of a scenario are drawn from its seed, each by itself: a
factor changes the requests that it is about, and no others.
"""

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

# Before the factor, for what is usual; then the factor; then time for its last requests.
FACTOR_FROM_S, FACTOR_UNTIL_S, UNTIL_S = 120.0, 165.0, 180.0

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """How long the parts of a step take on some GPUs with some model; see `scheduler_driver.py`."""

    weights_s: float
    token_s: float
    kv_token_s: float
    attention_s: float
    launch_s: float = 0.001
    request_s: float = 0.00005
    overlap: float = 6.0
    noise: float = 0.02
    # How much of a step the core's main thread runs.
    processor_share: float = 0.3


def machine(
    *, weights: float, layers: int, hidden: int, kv_bytes: int, gpus: int, of: "Gpu"
) -> Machine:
    """The roofline of a dense model of so many weights of two bytes, split over some GPUs.

    Each token needs two operations for a weight, and four for each layer, hidden value and token of
    its context (attention's two products). A token of a context has `kv_bytes` in the KV cache.
    """
    return Machine(
        weights_s=2 * weights / gpus / of.bytes_per_s,
        token_s=2 * weights / gpus / of.flops,
        kv_token_s=kv_bytes / gpus / of.bytes_per_s,
        attention_s=4 * layers * hidden / gpus / of.flops,
        # All-reduces of each layer, where there are several GPUs.
        launch_s=0.001 + (0.00002 * layers if gpus > 1 else 0.0),
    )


@dataclass(frozen=True, slots=True)
class Gpu:
    """What kernels reach of a GPU: the data sheet's memory bandwidth times 0.85, and its dense
    BF16 rate times 0.55."""

    bytes_per_s: float
    flops: float


L4 = Gpu(0.85 * 300e9, 0.55 * 121e12)
A100 = Gpu(0.85 * 2.04e12, 0.55 * 312e12)
H100 = Gpu(0.85 * 3.35e12, 0.55 * 990e12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A log-normal number of tokens, between two bounds."""

    median: int
    sigma: float
    least: int
    most: int

    def drawn(self, draws: random.Random) -> int:
        """One number."""
        tokens = self.median * math.exp(self.sigma * draws.gauss(0.0, 1.0))
        return round(min(max(tokens, self.least), self.most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests whose rate rises and falls as over a day, some of them in packs.

    A prompt is a tenant's own prefix, then in `document_share` of the requests a document that
    several requests of that time ask about, then a part that no other request has.
    """

    per_s: float
    tenants: tuple[int, ...]
    own: Lengths
    output: Lengths
    document: Lengths | None = None
    document_s: float = 6.0
    swing: float = 0.3
    pack_share: float = 0.04
    pack: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """Something that is otherwise from FACTOR_FROM_S until FACTOR_UNTIL_S, and its true causes.

    `script` has the driver's faults with their strengths; `accepted`, `places` and so on. The other
    fields change requests. `load` times as many requests come. `long_share` of them have a part of
    their own of `long_tokens`, and no cache knows these. `outputs` times as many tokens are
    generated. `new_tenant` more requests, as a share, come of a tenant whose prompts all differ.
    With `changed` each prompt begins otherwise, as with the time of day in its first line. Each
    prompt takes `front_s` longer to tokenise. The requests of a pack come `spread_s` after one
    another. `engine` are arguments of the engine that hold during the whole run.
    """

    name: str
    causes: frozenset[str] = frozenset()
    script: tuple[tuple[str, float], ...] = ()
    stall_every_s: float = 0.0
    stall_s: tuple[float, float] = (0.5, 1.2)
    load: float = 1.0
    long_share: float = 0.0
    long_tokens: int = 0
    outputs: float = 1.0
    new_tenant: float = 0.0
    changed: bool = False
    front_s: float = 0.0
    spread_s: float = 0.0
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """An engine with its arguments, as on vLLM's command line, its machine and its traffic."""

    name: str
    machine: Machine
    traffic: Traffic
    engine: Mapping[str, Any]
    seed: int = 1

    def __hash__(self) -> int:
        return hash((self.name, self.seed))

    def arguments(self, factors: tuple[Factor, ...]) -> Json:
        """The engine's arguments with these factors."""
        engine = dict(self.engine)
        for factor in factors:
            engine |= factor.engine
        return engine

    def job(self, factors: tuple[Factor, ...]) -> Json:
        """What the driver needs to run it with these factors."""
        return {
            "engine": self.arguments(factors),
            "machine": asdict(self.machine) | {"seed": self.seed},
            "requests": sorted(_requests(self, factors), key=lambda each: each["queued_s"]),
            "script": _script(factors, self.seed),
        }


def _script(factors: tuple[Factor, ...], seed: int) -> Json:
    script: Json = {"stalls": []}
    for factor in factors:
        for effect, strength in factor.script:
            script.setdefault(effect, []).append([FACTOR_FROM_S, FACTOR_UNTIL_S, strength])
        if factor.stall_every_s:
            draws, at_s = random.Random(f"stalls {seed}"), FACTOR_FROM_S
            while (at_s := at_s + draws.expovariate(1 / factor.stall_every_s)) < FACTOR_UNTIL_S:
                script["stalls"].append([at_s, draws.uniform(*factor.stall_s)])
    return script


def _holds(at_s: float) -> bool:
    return FACTOR_FROM_S <= at_s < FACTOR_UNTIL_S


@dataclass(frozen=True, slots=True)
class _Arrival:
    at_s: float
    number: int
    # Of another tenant, none of whose prompts a cache has.
    strange: bool = False
    later_s: float = 0.0


def _arrivals(scenario: Scenario, factors: tuple[Factor, ...]) -> Iterator[_Arrival]:
    """The usual requests, which keep their numbers, and then those that a factor adds."""
    per_s = scenario.traffic.per_s
    spread_s = max((factor.spread_s for factor in factors), default=0.0)
    usual = list(_times(scenario, "usual", per_s, 0.0, UNTIL_S))
    for number, (at_s, place) in enumerate(usual, 1):
        yield _Arrival(at_s, number, later_s=place * spread_s if _holds(at_s) else 0.0)
    # The requests of a smaller load are among those of a larger one.
    for place, factor in enumerate(factors):
        for name, share in (("load", factor.load - 1.0), ("strange", factor.new_tenant)):
            if share > 0:
                more = _times(scenario, name, share * per_s, FACTOR_FROM_S, FACTOR_UNTIL_S)
                first = 100_000 * (1 + 2 * place + (name == "strange"))
                for number, (at_s, _) in enumerate(more, first):
                    yield _Arrival(at_s, number, strange=name == "strange")


def _times(
    scenario: Scenario, name: str, per_s: float, since_s: float, until_s: float
) -> Iterator[tuple[float, int]]:
    """Poisson arrivals at a rate that swings as over a day, some of which bring others at once.

    Each with its place in its pack.
    """
    traffic = scenario.traffic
    draws = random.Random(f"{scenario.name} {scenario.seed} {name}")
    most, at_s = per_s * (1 + traffic.swing), since_s
    while (at_s := at_s + draws.expovariate(most)) < until_s:
        rate = per_s * (1 + traffic.swing * math.sin(2 * math.pi * at_s / UNTIL_S * 3))
        if draws.random() * most < rate / (1 + traffic.pack_share * traffic.pack):
            more = traffic.pack if draws.random() < traffic.pack_share else 0
            yield from ((at_s + 0.001 * place, place) for place in range(1 + more))


def _requests(scenario: Scenario, factors: tuple[Factor, ...]) -> Iterator[Json]:
    for arrival in _arrivals(scenario, factors):
        draws = random.Random(f"{scenario.name} {scenario.seed} request {arrival.number}")
        prompt, output_tokens = _prompt(scenario.traffic, arrival, draws), 0
        output_tokens = scenario.traffic.output.drawn(draws)
        long_draw, front_s = draws.random(), 0.002 + draws.expovariate(1000.0)
        if _holds(arrival.at_s):
            for factor in factors:
                output_tokens = round(output_tokens * factor.outputs)
                front_s += factor.front_s
                if factor.changed:
                    first = arrival.number + 30_000_000
                    prompt = [[first, sum(tokens for _, tokens in prompt)]]
                if long_draw < factor.long_share:
                    prompt = [[arrival.number + 50_000_000, factor.long_tokens]]
        front_s += 4e-6 * sum(tokens for _, tokens in prompt)
        arrived_s = arrival.at_s + arrival.later_s
        yield {
            "id": f"{arrival.number:032x}",
            "arrived_s": arrived_s,
            "queued_s": arrived_s + front_s,
            "prompt": prompt,
            "output_tokens": output_tokens,
        }


def _prompt(traffic: Traffic, arrival: _Arrival, draws: random.Random) -> list[list[int]]:
    """The parts of a prompt, each a seed of its tokens and their number."""
    tenant = draws.randrange(len(traffic.tenants))
    parts = [[tenant, traffic.tenants[tenant]]]
    if traffic.document is not None:
        document = 1000 * (tenant + 1) + int(arrival.at_s / traffic.document_s)
        parts.append([document, traffic.document.drawn(random.Random(f"document {document}"))])
    if arrival.strange:
        parts = [[arrival.number + 20_000_000, sum(tokens for _, tokens in parts)]]
    parts.append([arrival.number + 10_000_000, traffic.own.drawn(draws)])
    return parts


_ENGINE = {"enable_prefix_caching": True, "async_scheduling": True}

CHAT = Scenario(
    name="chat, 8B on one L4",
    machine=machine(weights=8e9, layers=32, hidden=4096, kv_bytes=131_072, gpus=1, of=L4),
    traffic=Traffic(
        per_s=1.0,
        tenants=(900, 700, 500, 300),
        own=Lengths(median=180, sigma=0.7, least=16, most=2500),
        output=Lengths(median=90, sigma=0.6, least=8, most=400),
    ),
    engine={
        **_ENGINE,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "max_model_len": 16_384,
        "num_gpu_blocks_override": 2600,
    },
)
LARGE = Scenario(
    name="chat, 70B on four H100",
    machine=machine(weights=70e9, layers=80, hidden=8192, kv_bytes=327_680, gpus=4, of=H100),
    traffic=Traffic(
        per_s=4.0,
        tenants=(1500, 1000, 600, 400, 200),
        own=Lengths(median=350, sigma=0.8, least=16, most=6000),
        output=Lengths(median=120, sigma=0.7, least=8, most=600),
    ),
    engine={
        **_ENGINE,
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 8192,
        "max_model_len": 32_768,
        "num_gpu_blocks_override": 15_000,
    },
)
DOCUMENTS = Scenario(
    name="documents, 14B on one A100",
    # As if each kernel read first and computed then: a step is linear in its tokens.
    machine=replace(
        machine(weights=14e9, layers=48, hidden=5120, kv_bytes=196_608, gpus=1, of=A100),
        overlap=1.0,
    ),
    traffic=Traffic(
        per_s=1.6,
        tenants=(400, 400, 400),
        document=Lengths(median=4000, sigma=0.5, least=500, most=12_000),
        own=Lengths(median=100, sigma=0.5, least=16, most=600),
        output=Lengths(median=50, sigma=0.5, least=4, most=200),
    ),
    engine={
        **_ENGINE,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "max_model_len": 32_768,
        "num_gpu_blocks_override": 10_000,
    },
)
DRAFTING = Scenario(
    name="agents with drafts, 32B on two A100",
    machine=machine(weights=32e9, layers=64, hidden=5120, kv_bytes=262_144, gpus=2, of=A100),
    traffic=Traffic(
        per_s=1.5,
        tenants=(3000, 2000, 1500),
        own=Lengths(median=400, sigma=0.9, least=32, most=5000),
        output=Lengths(median=150, sigma=0.6, least=16, most=600),
    ),
    engine={
        **_ENGINE,
        # Drafts from the prompt: this vLLM schedules them one step at a time.
        "async_scheduling": False,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "max_num_seqs": 256,
        "max_num_batched_tokens": 4096,
        "max_model_len": 32_768,
        "num_gpu_blocks_override": 12_000,
    },
)
SCENARIOS = (CHAT, LARGE, DOCUMENTS, DRAFTING)

_LOAD = frozenset(
    (
        *("burst", "batch_load", "prefill_contention", "prefill_interference"),
        *("prefill_backlog", "kv_pressure", "sequence_cap", "preemption"),
    )
)
_LONG = frozenset(
    ("long_prompt", "prefill_backlog", "prefill_contention", "prefill_interference", "kv_pressure")
)


def slower(strength: float) -> Factor:
    """Every step takes longer, and nothing that an agent sees tells why."""
    return Factor(name=f"slow steps x{strength}", script=(("slow", strength),))


def starved(strength: float) -> Factor:
    """Every step takes longer, as the core's main thread waits for a processor."""
    causes = frozenset(("cpu_starved",))
    return Factor(name=f"CPU starved x{strength}", script=(("starved", strength),), causes=causes)


def throttled(strength: float) -> Factor:
    """Every step takes longer, as the GPU's clock is lower."""
    causes = frozenset(("gpu_throttled",))
    return Factor(
        name=f"GPU throttled x{strength}", script=(("throttled", strength),), causes=causes
    )


def loaded(times: float) -> Factor:
    """More requests."""
    return Factor(name=f"load x{times}", load=times, causes=_LOAD)


def long_prompts(share: float, tokens: int) -> Factor:
    """A share of the requests has long prompts."""
    return Factor(
        name=f"{share:.0%} long prompts",
        long_share=share,
        long_tokens=tokens,
        causes=_LONG,
    )


def long_outputs(times: float) -> Factor:
    """Responses are longer, so more requests run at once."""
    causes = frozenset(("batch_load", "long_output", "kv_pressure", "preemption", "sequence_cap"))
    return Factor(name=f"outputs x{times}", outputs=times, causes=causes)


def strangers(share: float) -> Factor:
    """More requests, of a tenant whose prompts no cache has."""
    return Factor(
        name=f"a new tenant, +{share:.0%}", new_tenant=share, causes=_LOAD | {"long_prompt"}
    )


def blocks_taken(share: float) -> Factor:
    """A share of the KV cache is not there."""
    causes = frozenset(("kv_pressure", "preemption"))
    return Factor(name="small KV cache", script=(("blocks_taken", share),), causes=causes)


def engine_blocks(number: int) -> Factor:
    """The engine has a small KV cache all the time."""
    causes = frozenset(("kv_pressure", "preemption"))
    # A request of the greatest length must fit.
    arguments = {"num_gpu_blocks_override": number, "max_model_len": 8192}
    return Factor(name="a smaller GPU", engine=arguments, causes=causes)


def engine_places(number: int) -> Factor:
    """The engine runs few requests at once all the time."""
    causes = frozenset(("sequence_cap",))
    return Factor(name="low --max-num-seqs", engine={"max_num_seqs": number}, causes=causes)


def places(number: int) -> Factor:
    """The engine runs few requests at once."""
    causes = frozenset(("sequence_cap",))
    return Factor(name="few places", script=(("places", number),), causes=causes)


def stalls(every_s: float) -> Factor:
    """The engine stands still for 0.5 to 1.2 s now and then."""
    return Factor(
        name=f"stalls every {every_s:g} s", stall_every_s=every_s, causes=frozenset(("stall",))
    )


def refused(accepted: float) -> Factor:
    """Fewer draft tokens are accepted; without a fault three of four are."""
    causes = frozenset(("speculation",))
    return Factor(
        name=f"drafts accepted {accepted:.0%}", script=(("accepted", accepted),), causes=causes
    )


def slow_tokeniser(seconds: float) -> Factor:
    """Each prompt takes longer to become tokens."""
    return Factor(
        name=f"tokeniser +{seconds:g} s", front_s=seconds, causes=frozenset(("tokenising",))
    )


# Blocks that no request uses are evicted at once.
CACHE_LOST = Factor(
    name="unused prefixes evicted",
    script=(("cache_lost", 1.0),),
    causes=frozenset(("cache_miss",)),
)
# The usual traffic without its packs.
PACKS_SPREAD = Factor(name="no packs", spread_s=3.0, causes=_LOAD)
PREFIXES_CHANGED = Factor(name="prefixes changed", changed=True, causes=frozenset(("cache_miss",)))
