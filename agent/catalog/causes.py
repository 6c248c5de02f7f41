"""Causes: what made a request miss its objective, and what an operator can do about each.

The flags are those of vLLM 0.32.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class RequestPart(StrEnum):
    """The part of a request in which the time was lost."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    FRONT = "front"
    FAILURE = "failure"
    UNKNOWN = "unknown"


class Cause(StrEnum):
    """Why time was lost. The values are stored, and are labels of metrics."""

    KV_PRESSURE = "kv_pressure"
    SEQUENCE_CAP = "sequence_cap"
    DEFERRED = "deferred"
    GRAMMAR = "grammar"
    PREFILL_BACKLOG = "prefill_backlog"
    ADMISSION = "admission"
    BURST = "burst"
    LONG_PROMPT = "long_prompt"
    CACHE_MISS = "cache_miss"
    PREFILL_CONTENTION = "prefill_contention"
    PREEMPTION = "preemption"
    PREFILL_INTERFERENCE = "prefill_interference"
    BATCH_LOAD = "batch_load"
    LONG_OUTPUT = "long_output"
    SPECULATION = "speculation"
    GPU_THROTTLED = "gpu_throttled"
    TOKENISING = "tokenising"
    PARSER_HOLDBACK = "parser_holdback"
    SLOW_CLIENT = "slow_client"
    NETWORK = "network"
    CPU_STARVED = "cpu_starved"
    ENGINE_FAILURE = "engine_failure"
    STALL = "stall"
    COLD_START = "cold_start"
    UNEXPLAINED = "unexplained"


class Effect(NamedTuple):
    """What a change did on vLLM's own scheduler, in the cases in which a cause was named.

    It helped or harmed where the seconds beyond the limits changed by a tenth or more. `change` is
    the median: -0.6 if 60 % fewer. See docs/causes-advice.md.
    """

    tried: int
    helped: int
    harmed: int
    change: float

    @property
    def text(self) -> str:
        """The effect as the end of a sentence on the change."""
        harmed = f", and made {self.harmed} worse" if self.harmed else ""
        more = "more" if self.change > 0 else "less"
        median = f"the excess was {abs(self.change):.0%} {more} (median)"
        return f"helped in {self.helped} of {self.tried} modelled cases{harmed}: {median}."


class Tried(NamedTuple):
    """Another change that was tried: it may have harmed."""

    change: str
    effect: Effect

    @property
    def text(self) -> str:
        """The change and its effect in a sentence."""
        return f"{self.change} {self.effect.text}"


class CauseFacts(NamedTuple):
    """What we know of a cause.

    `remedy` says in a sentence what to change and names the one `flag` of vLLM for it, None if no
    flag helps. `costs` is what the change costs, None if nothing. `when` is the condition
    under which it helps. `effect` is None if the change was not tried.
    """

    part: RequestPart
    meaning: str
    remedy: str
    flag: str | None
    costs: str | None
    when: str | None = None
    effect: Effect | None = None
    also: Tried | None = None

    @property
    def measured(self) -> str | None:
        """What the changes did, in sentences."""
        effect = None if self.effect is None else f"It {self.effect.text}"
        also = None if self.also is None else self.also.text
        return " ".join(filter(None, (effect, also))) or None

    @property
    def text(self) -> str:
        """What to change, when, and what it did."""
        return " ".join(filter(None, (self.remedy, self.when, self.measured)))


CAUSES: Mapping[Cause, CauseFacts] = {
    Cause.KV_PRESSURE: CauseFacts(
        RequestPart.QUEUE,
        "The request waited because the KV cache had no room for it.",
        "Raise `--gpu-memory-utilization`: the KV cache gets more of the GPU's memory.",
        "--gpu-memory-utilization",
        "Less memory is left for peaks and for other programs on the GPU.",
        when="The GPU needs free memory for that: a quarter more KV cache was tried.",
        effect=Effect(tried=5, helped=5, harmed=0, change=-0.53),
        also=Tried(
            "Three quarters of `--max-num-seqs`", Effect(tried=5, helped=0, harmed=0, change=0.03)
        ),
    ),
    Cause.SEQUENCE_CAP: CauseFacts(
        RequestPart.QUEUE,
        "The request waited because as many requests ran as the engine may run at once.",
        "Raise `--max-num-seqs`, as far as the KV cache has room.",
        "--max-num-seqs",
        "Larger steps take longer, so TPOT rises for all.",
        when="The KV cache had room for them: twice as many were tried.",
        effect=Effect(tried=5, helped=5, harmed=0, change=-0.93),
    ),
    Cause.DEFERRED: CauseFacts(
        RequestPart.QUEUE,
        "The engine had room, and the request waited for KV values from elsewhere, an adapter or a "
        "grammar.",
        "Give the connector in `--kv-transfer-config` more bandwidth; use fewer adapters and "
        "grammars.",
        "--kv-transfer-config",
        "Network, memory and processor time of both engines.",
    ),
    Cause.GRAMMAR: CauseFacts(
        RequestPart.QUEUE,
        "The request waited until the grammar of its output format was compiled.",
        "Choose another backend in `--structured-outputs-config`, or simplify the schema.",
        "--structured-outputs-config",
        "Backends accept different schemas, and some take more time per token instead.",
    ),
    Cause.PREFILL_BACKLOG: CauseFacts(
        RequestPart.QUEUE,
        "The request waited because prompts before it filled the engine's steps.",
        "Add replicas, for example with `--data-parallel-size`.",
        "--data-parallel-size",
        "A set of GPUs for each replica.",
        effect=Effect(tried=6, helped=6, harmed=0, change=-0.63),
        also=Tried(
            "Four times `--max-num-batched-tokens`",
            Effect(tried=4, helped=0, harmed=4, change=0.16),
        ),
    ),
    Cause.ADMISSION: CauseFacts(
        RequestPart.QUEUE,
        "The engine refused the request because too many were in it already.",
        "Raise `--max-num-queued-reqs`, or add engines.",
        "--max-num-queued-reqs",
        "Requests wait instead of being refused, so TTFT rises.",
    ),
    Cause.BURST: CauseFacts(
        RequestPart.QUEUE,
        "More requests came at once than the engine usually gets.",
        "Add replicas, for example with `--data-parallel-size`.",
        "--data-parallel-size",
        "A set of GPUs for each replica, idle between bursts.",
        effect=Effect(tried=3, helped=3, harmed=0, change=-0.98),
    ),
    Cause.LONG_PROMPT: CauseFacts(
        RequestPart.PREFILL,
        "The prompt is so long that computing it alone takes that long.",
        "Raise `--tensor-parallel-size`, or give long prompts an objective of their own.",
        "--tensor-parallel-size",
        "More GPUs, which spend a part of their time on exchanging data.",
        when="Twice as many GPUs were tried.",
        effect=Effect(tried=5, helped=5, harmed=0, change=-0.96),
    ),
    Cause.CACHE_MISS: CauseFacts(
        RequestPart.PREFILL,
        "The prompt was computed anew, though the prefix cache had held such prompts before.",
        "Set `--kv-offloading-size`: evicted KV cache is kept in the host's memory.",
        "--kv-offloading-size",
        "Host memory, and time on the bus to the GPU.",
    ),
    Cause.PREFILL_CONTENTION: CauseFacts(
        RequestPart.PREFILL,
        "Other prompts were computed in the same steps.",
        "Add replicas, for example with `--data-parallel-size`.",
        "--data-parallel-size",
        "A set of GPUs for each replica.",
        effect=Effect(tried=10, helped=10, harmed=0, change=-0.7),
        also=Tried(
            "A `--long-prefill-token-threshold` of a quarter of the step",
            Effect(tried=4, helped=2, harmed=1, change=-0.17),
        ),
    ),
    Cause.PREEMPTION: CauseFacts(
        RequestPart.DECODE,
        "The engine took the request's KV cache for others, and computed it again later.",
        "Raise `--gpu-memory-utilization`: the KV cache gets more of the GPU's memory.",
        "--gpu-memory-utilization",
        "Less memory is left for peaks and for other programs on the GPU.",
        when="The GPU needs free memory for that: a quarter more KV cache was tried.",
        effect=Effect(tried=3, helped=3, harmed=0, change=-0.53),
        also=Tried("A `--watermark` of 0.1", Effect(tried=3, helped=0, harmed=2, change=0.2)),
    ),
    Cause.PREFILL_INTERFERENCE: CauseFacts(
        RequestPart.DECODE,
        "Steps that computed prompts of others delayed the request's tokens.",
        "Add replicas, for example with `--data-parallel-size`.",
        "--data-parallel-size",
        "A set of GPUs for each replica.",
        effect=Effect(tried=10, helped=10, harmed=0, change=-0.75),
        also=Tried(
            "A quarter of `--max-num-batched-tokens`",
            Effect(tried=10, helped=8, harmed=1, change=-0.25),
        ),
    ),
    Cause.BATCH_LOAD: CauseFacts(
        RequestPart.DECODE,
        "So many requests ran together that each step took long.",
        "Add replicas, for example with `--data-parallel-size`.",
        "--data-parallel-size",
        "A set of GPUs for each replica.",
        effect=Effect(tried=7, helped=7, harmed=0, change=-0.98),
        also=Tried(
            "Three quarters of `--max-num-seqs`", Effect(tried=7, helped=0, harmed=6, change=2.15)
        ),
    ),
    Cause.LONG_OUTPUT: CauseFacts(
        RequestPart.DECODE,
        "The response has so many tokens that generating them alone takes that long.",
        "Set `max_new_tokens` in `--override-generation-config`, or give long responses an "
        "objective of their own.",
        "--override-generation-config",
        "Longer responses are cut off.",
    ),
    Cause.SPECULATION: CauseFacts(
        RequestPart.DECODE,
        "The engine accepted fewer draft tokens than usual, so each step gave fewer tokens.",
        "No flag was seen to help: a refused draft token costs little. See what changed in the "
        "prompts, or use another draft model.",
        None,
        None,
        also=Tried("1 draft token in place of 3", Effect(tried=1, helped=0, harmed=1, change=0.37)),
    ),
    Cause.GPU_THROTTLED: CauseFacts(
        RequestPart.DECODE,
        "The GPU ran at lower clocks because of its power limit or its temperature.",
        "Cool the GPU, or raise its power limit with `nvidia-smi -pl`; no engine flag helps.",
        None,
        "More power and heat.",
    ),
    Cause.TOKENISING: CauseFacts(
        RequestPart.FRONT,
        "The engine's front took long to make tokens of the prompt.",
        "Raise `--renderer-num-workers`: more threads make tokens of prompts.",
        "--renderer-num-workers",
        "A processor core for each worker.",
    ),
    Cause.PARSER_HOLDBACK: CauseFacts(
        RequestPart.FRONT,
        "The engine had computed tokens that a parser of tools or reasoning held back.",
        "Choose another `--tool-call-parser`, one that streams.",
        "--tool-call-parser",
        "Parsers differ in the models and the forms of calls that they can read.",
    ),
    Cause.SLOW_CLIENT: CauseFacts(
        RequestPart.FRONT,
        "The client read its response more slowly than the engine wrote it.",
        "Raise `--stream-interval`: the client gets fewer and larger chunks.",
        "--stream-interval",
        "Text appears in groups of tokens.",
    ),
    Cause.NETWORK: CauseFacts(
        RequestPart.FRONT,
        "Time passed between the client, the proxy and the engine.",
        "Bring the proxy and the engine nearer to each other; no engine flag helps.",
        None,
        None,
    ),
    Cause.CPU_STARVED: CauseFacts(
        RequestPart.FRONT,
        "The engine's processes waited for a processor.",
        "Give the engine's container more processor time; no engine flag helps.",
        None,
        "Processor cores.",
    ),
    Cause.ENGINE_FAILURE: CauseFacts(
        RequestPart.FAILURE,
        "The engine failed, or could not be reached.",
        "Read the engine's events at that time; no flag helps.",
        None,
        None,
    ),
    Cause.STALL: CauseFacts(
        RequestPart.UNKNOWN,
        "The engine stood still: a single step took many times as long as its tokens need.",
        "Read the engine's events and log at that time; no flag helps.",
        None,
        None,
    ),
    Cause.COLD_START: CauseFacts(
        RequestPart.UNKNOWN,
        "The engine had just started, and was still warming up.",
        "Send a few requests of your own before the engine gets traffic; no flag helps.",
        None,
        "The engine takes traffic later.",
    ),
    Cause.UNEXPLAINED: CauseFacts(
        RequestPart.UNKNOWN,
        "No cause was found: the evidence names sources that would help.",
        "Install the agent's engine plugin, or let requests go through the proxy where the engine "
        "takes none.",
        None,
        None,
    ),
}
