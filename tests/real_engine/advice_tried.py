"""The commonest changes tried on a real vLLM with a tiny model: `python -m` this, some minutes.

The engines stay up side by side, and only one of them has requests: usual ones, then also long
prompts, then many more. Other programs on the machine disturb all of them alike, because each gets
the same few seconds of requests again and again, in turn.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import aiohttp

from tests.real_parts.ports import free_port
from tests.real_parts.vllm import Vllm

ROUNDS = 8
LASTS_S = 6.0
_MET = 0.97
_VOCABULARY = 2000


class Request(NamedTuple):
    """When it is sent, and its tokens."""

    at_s: float
    prompt: Sequence[int]
    output_tokens: int


class Times(NamedTuple):
    """What its client measured."""

    ttft_s: float
    tpot_s: float
    output_tokens: int


def _requests(seed: int, per_s: float, prompt: int, output: int) -> Iterator[Request]:
    draws, at_s = Random(seed), 0.0
    while (at_s := at_s + draws.expovariate(per_s)) < LASTS_S:
        tokens = [draws.randrange(10, _VOCABULARY) for _ in range(prompt)]
        yield Request(at_s, tokens, round(output * draws.uniform(0.5, 1.5)))


USUAL = list(_requests(1, 3.0, 60, 60))
TRAFFIC = {
    "usual": USUAL,
    "long prompts": USUAL + list(_requests(2, 1.5, 1900, 8)),
    "more requests": list(_requests(3, 20.0, 60, 60)),
}
ENGINES: Mapping[str, Sequence[str]] = {
    "as it is: 2,048 tokens a step": (),
    "`--max-num-batched-tokens 512`": ("--max-num-batched-tokens", "512"),
    "`--long-prefill-token-threshold 512`": ("--long-prefill-token-threshold", "512"),
    "`--max-num-seqs 8`": ("--max-num-seqs", "8"),
}
AS_IT_IS = next(iter(ENGINES))

# What clients measured, by engine and traffic.
Round = Mapping[str, Mapping[str, Sequence["Times"]]]


async def _sent(session: aiohttp.ClientSession, began: float, request: Request) -> Times:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(began + request.at_s - loop.time())
    body = {
        "model": "tiny-llama",
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    sent = loop.time()
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        arrived = [loop.time() async for line in response.content if line.startswith(b"data: {")]
    tokens = request.output_tokens
    return Times(arrived[0] - sent, (arrived[-1] - arrived[0]) / max(1, tokens - 1), tokens)


async def _measured(url: str, requests: Sequence[Request]) -> list[Times]:
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        began = asyncio.get_running_loop().time() + 0.5
        return await asyncio.gather(*(_sent(session, began, each) for each in requests))


@contextmanager
def _engines(folder: Path) -> Iterator[dict[str, str]]:
    """The address of each engine by its name."""
    with ExitStack() as running:
        addresses = {}
        for number, (name, arguments) in enumerate(ENGINES.items()):
            own = folder / str(number)
            own.mkdir()
            engine = Vllm(own, port=free_port(), spans=None, extra=arguments)
            addresses[name] = running.enter_context(engine).url
            asyncio.run(_measured(engine.url, USUAL))
        yield addresses


def _round(addresses: Mapping[str, str]) -> Round:
    return {
        name: {traffic: asyncio.run(_measured(url, of)) for traffic, of in TRAFFIC.items()}
        for name, url in addresses.items()
    }


def _met(values: Iterable[float]) -> float:
    known = sorted(values)
    return known[int(_MET * len(known))]


def _misses(times: Sequence[Times], ttft_s: float, tpot_s: float) -> tuple[int, float]:
    """The requests beyond a limit, and the seconds beyond."""
    beyond = [
        max(0.0, each.ttft_s - ttft_s)
        + max(0.0, each.tpot_s - tpot_s) * max(1, each.output_tokens - 1)
        for each in times
    ]
    return sum(each > 0 for each in beyond), sum(beyond)


def _lines(rounds: Sequence[Round]) -> Iterator[str]:
    usual = [each for tried in rounds for each in tried[AS_IT_IS]["usual"]]
    limits = _met(each.ttft_s for each in usual), _met(each.tpot_s for each in usual)
    yield f"limits: TTFT {limits[0] * 1000:.0f} ms, TPOT {limits[1] * 1000:.1f} ms\n"
    for traffic, requests in TRAFFIC.items():
        before = [_misses(tried[AS_IT_IS][traffic], *limits)[1] for tried in rounds]
        for engine in ENGINES:
            found = [_misses(tried[engine][traffic], *limits) for tried in rounds]
            better = sum(each[1] < usual_s for each, usual_s in zip(found, before, strict=True))
            yield (
                f"| {traffic} | {engine} | {median(each[0] for each in found):.0f} of "
                f"{len(requests)} | {median(each[1] for each in found):.1f} s "
                f"| {'' if engine == AS_IT_IS else f'{better} of {len(rounds)}'} |"
            )


def main(path: Path | None) -> None:
    """Print the table; keep all times in a file, if one is named."""
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as folder, _engines(Path(folder)) as addresses:
        for _ in range(ROUNDS):
            rounds.append(_round(addresses))
            if path is not None:
                path.write_text(json.dumps(rounds))
            sys.stdout.write("\n".join(_lines(rounds)) + "\n\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
