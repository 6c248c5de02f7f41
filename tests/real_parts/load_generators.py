"""The load generators' own code: goodput of vLLM's benchmark, AIPerf and GuideLLM; token times."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from tests.real_parts.engine_scripts import answer_of
from tests.real_parts.processes import PartMissing

TOOLS = ("vllm", "aiperf", "guidellm")
INSTALLER = Path(__file__).parents[2] / ".ci" / "install-load-generators"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """One request as a client sees it; times in seconds from its start.

    `ending` is ok, error or cancelled. `first_s` is the first token and `end_s` the last one, or
    the end of a response without a token. `tokens` is the usage of the response.
    """

    ending: str = "ok"
    first_byte_s: float = 0.05
    first_s: float | None
    end_s: float
    tokens: int | None


# Limits in milliseconds: ttft, tpot, e2e.
LimitsMs = Mapping[str, float | None]


class Score(NamedTuple):
    """The number of good requests, and of all requests that count."""

    good: int
    population: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One stream that a client reads: its events with their times, and its output tokens."""

    client: str
    endpoint: str
    events: Sequence[tuple[str, float]]
    tokens: int


class Answer(NamedTuple):
    """What each tool counts of each group for each set of limits, and each stream's TPOT."""

    scores: dict[str, list[list[Score]]]
    tpot_s: list[float]


def answer(
    limits: Sequence[LimitsMs],
    groups: Sequence[Sequence[ClientRequest]],
    streams: Sequence[Stream],
) -> Answer:
    """What the tools' own code computes; to load it takes long, so all is asked at once."""
    where = subprocess.run([INSTALLER, "--where"], capture_output=True, text=True, check=False)
    if where.returncode != 0:
        raise PartMissing("GuideLLM and AIPerf are not installed: run .ci/install-parts")
    plan = {
        "limits": limits,
        "groups": [[asdict(request) for request in group] for group in groups],
        "streams": [asdict(stream) for stream in streams],
    }
    found = answer_of("run_load_generators.py", plan, Path(where.stdout.strip()))
    scores = {
        tool: [[Score(*each) for each in of_limits] for of_limits in scored]
        for tool, scored in found["scores"].items()
    }
    return Answer(scores, found["tpot_s"])
