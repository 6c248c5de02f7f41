"""Faults made for real on an engine, one at a time, and the causes that are true of them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from agent.catalog.causes import Cause
from tests.real_engine.causes_cpu import short_of_processor
from tests.real_engine.causes_traffic import (
    USUAL_OUTPUT,
    USUAL_PROMPT,
    Asked,
    Traffic,
    at_once,
    for_a_while,
    short,
    usual,
)
from tests.real_parts.vllm import Vllm

# As many are made of each fault at least, if the machine is slow.
AT_LEAST = 24
LONG_PROMPT, PACK = 1900, 6
WORDS = 2500
SURGE = 60
STALLED = 20


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a fault is made."""

    traffic: Traffic
    engine: Vllm


def long_prompts(scene: Scene) -> None:
    """Packs of long prompts between short ones."""
    traffic = scene.traffic

    def ask_long(_: int) -> Asked:
        return traffic.ask("long", traffic.new_prompt(LONG_PROMPT), 2)

    def pack() -> Asked:
        at_once(PACK - 1, ask_long)
        return ask_long(0)

    def client(number: int) -> None:
        if number:
            short(traffic, 5.0, "between", clients=6, longer=0.15)
        else:
            for_a_while(5.0, 1, pack, pause_s=0.7)

    at_once(2, client)


def cache_misses(scene: Scene) -> None:
    """Prompts as long as the usual ones, of which the cache has nothing."""
    traffic = scene.traffic

    def ask() -> Asked:
        return traffic.ask("cache", traffic.new_prompt(USUAL_PROMPT), 2)

    for_a_while(3.0, 8, ask, pause_s=0.15, at_least=AT_LEAST)


def slow_grammar(scene: Scene) -> None:
    """Grammars that take long to compile, each another one."""
    traffic = scene.traffic

    def ask() -> Asked:
        grammar = {"choice": [str(traffic.new_prompt(3)) for _ in range(WORDS)]}
        return traffic.ask(
            "grammar", traffic.usual_prompt(), USUAL_OUTPUT, structured_outputs=grammar
        )

    for_a_while(3.0, 4, ask, at_least=AT_LEAST)


def short_of_cpu(scene: Scene) -> None:
    """Usual requests while the engine has little of a processor."""
    with short_of_processor(scene.engine.front_pid):
        usual(scene.traffic, 3.0, "cpu", clients=8, at_least=AT_LEAST)


def slow_clients(scene: Scene) -> None:
    """Clients that do not read for a while, of responses larger than what lies in between holds."""
    asked = {
        "messages": [{"role": "user", "content": "hogonu bari"}],
        "max_tokens": 24,
        "logprobs": True,
        "top_logprobs": 200,
    }
    at_once(STALLED, lambda _: scene.traffic.chat_slowly("slow", asked, stall_s=5.0), apart_s=0.15)


def surge(scene: Scene) -> None:
    """Many usual requests at once."""
    traffic = scene.traffic
    at_once(SURGE, lambda _: traffic.ask("surge", traffic.usual_prompt(), 2 * USUAL_OUTPUT))


def little(traffic: Traffic, name: str) -> Asked:
    """A request of two blocks of the KV cache."""
    return traffic.ask(name, traffic.new_prompt(48), 16)


def growing(traffic: Traffic, name: str) -> Asked:
    """A request of four blocks that grows to nine."""
    return traffic.ask(name, traffic.new_prompt(100), 160)


def few_places(scene: Scene) -> None:
    """Four times as many clients as there are places."""
    for_a_while(2.0, 32, lambda: little(scene.traffic, "places"))


def tiny_kv(scene: Scene) -> None:
    """More prompts than fit into the KV cache, and they grow there."""
    for_a_while(4.0, 16, lambda: growing(scene.traffic, "kv"), apart_s=0.12, at_least=AT_LEAST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault, the names of its requests, and the causes that are true of them.

    `coarser` ones are true, too, where a more exact cause cannot be seen. What is not `in_engine`
    the engine itself does not feel.
    """

    name: str
    make: Callable[[Scene], None]
    of: tuple[str, ...]
    causes: frozenset[Cause]
    coarser: frozenset[Cause] = field(default=frozenset())
    in_engine: bool = True


_PREFILL = frozenset(
    {
        *(Cause.LONG_PROMPT, Cause.PREFILL_BACKLOG),
        *(Cause.PREFILL_CONTENTION, Cause.PREFILL_INTERFERENCE),
    }
)
LONG_PROMPTS = Fault(
    name="long prompts", make=long_prompts, of=("long", "between"), causes=_PREFILL
)
SLOW_CLIENTS = Fault(
    name="slow clients",
    make=slow_clients,
    of=("slow",),
    causes=frozenset({Cause.SLOW_CLIENT}),
    in_engine=False,
)
# The surge is the last: samples of a second show its requests also to those that come next.
OTHERS = (
    Fault(
        name="cache misses",
        make=cache_misses,
        of=("cache",),
        causes=frozenset({Cause.CACHE_MISS}),
        coarser=_PREFILL,
    ),
    Fault(
        name="slow grammar",
        make=slow_grammar,
        of=("grammar",),
        causes=frozenset({Cause.GRAMMAR, Cause.DEFERRED}),
    ),
    Fault(name="CPU short", make=short_of_cpu, of=("cpu",), causes=frozenset({Cause.CPU_STARVED})),
    Fault(name="queue surge", make=surge, of=("surge",), causes=frozenset({Cause.BURST})),
)
FEW_PLACES = Fault(
    name="few places", make=few_places, of=("places",), causes=frozenset({Cause.SEQUENCE_CAP})
)
TINY_KV = Fault(
    name="tiny KV cache",
    make=tiny_kv,
    of=("kv",),
    causes=frozenset({Cause.KV_PRESSURE, Cause.PREEMPTION}),
)
