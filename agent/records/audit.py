"""Evidence about a live deployment, which its audit judges. A part that is not known is None."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from agent.records.engine import EngineSample, HistogramSnapshot
from agent.records.gpu import GpuSample
from agent.records.model import ModelShape


class EvidencePart(StrEnum):
    """A part of the evidence that may be missing for a reason of its own."""

    EXPOSITION = "exposition"
    COMMAND_LINE = "command line"
    ADDRESSES = "addresses"
    GPUS = "GPUs"
    AGENT = "agent"
    REQUEST = "request"
    VERSION = "version"
    MODELS = "models"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """Flags of an engine's command line, of those that an audit needs, with their values.

    A switch has the empty text. `limits` are by fact name. `whole` is false if the engine also
    reads flags from a file, so that a flag that is not here may be set all the same.
    """

    flags: Mapping[str, str]
    limits: Mapping[str, int]
    whole: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEvidence:
    """What an engine's own responses say.

    `cache_config` are the labels of vLLM's `cache_config_info`. The histograms are those of tokens
    of finished requests and of steps. `answered` are requests for text by the class of their HTTP
    status, such as "4xx". `needs_key` is whether the list of models is refused without a key.
    `date_lead_s` is how far the clock of its HTTP responses is ahead of ours, at least.
    """

    url: str = ""
    sample: EngineSample | None = None
    expected: frozenset[str] = frozenset()
    cache_config: Mapping[str, str] = field(default_factory=dict)
    input_lengths: HistogramSnapshot | None = None
    output_lengths: HistogramSnapshot | None = None
    step_tokens: HistogramSnapshot | None = None
    answered: Mapping[str, float] | None = None
    version: str | None = None
    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    health: int | None = None
    needs_key: bool | None = None
    date_lead_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadHistory:
    """The load of an engine in the last hour, of which the agent saw `covered_s`.

    Gauges are means over time. 5 % of the requests waited longer than `waited_over_s`, the others
    `waited_within_s` at most, None above the engine's highest bucket.
    """

    covered_s: float
    waiting: float | None = None
    running: float | None = None
    cache_usage: float | None = None
    waited_over_s: float | None = None
    waited_within_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEvidence:
    """What a running agent knows of the engine.

    `lengths` are (input tokens, output tokens) of its newest `requests`, `engine_views` how many of
    those are in the engine's view, `proxy_views` in the user's; `in_front` of these were measured
    in the engine's front by its plugin, the others by the proxy. `left_after_s` are the durations
    of those whose clients left; None if neither the engine's plugin nor the proxy would report
    them. `cold` are the requests since the engine's start that missed because it had just started,
    1,000 at most. `plugin` is whether that plugin sends, None if the agent has no socket for it.
    `load` is None if the agent has no samples of the last hour.
    """

    requests: int = 0
    lengths: tuple[tuple[int, int], ...] = ()
    engine_views: int = 0
    proxy_views: int = 0
    in_front: int = 0
    left_after_s: tuple[float, ...] | None = None
    cold: int = 0
    plugin: bool | None = None
    load: LoadHistory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """The request that the audit sent, in Unix time by the clock of the audit.

    `problem` is why it did not end well. `lead_s` is how far its row lies after the request, or
    (negative) before it; None if none was there within `waited_s`. Its row comes of its span, or
    was measured `in_front`, by the plugin in the engine's front.
    """

    request_id: str
    sent_at: float
    ended_at: float
    problem: str | None = None
    waited_s: float = 0.0
    lead_s: float | None = None
    in_front: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyLimits:
    """Limits of all objectives in seconds."""

    ttft_s: tuple[float, ...] = ()
    tpot_s: tuple[float, ...] = ()
    e2e_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEvidence:
    """All evidence. `unread` says of a part why it is missing, `pids` are the engine's processes,
    `addresses` those that it listens on; `remote` is whether we reach it from another machine,
    `rust_frontend` whether it is a vLLM with its Rust frontend. `model` has the format of its
    weights. `stated_limits` are those that the engine's settings state, by fact name."""

    at: float
    engine: EngineEvidence
    limits: LatencyLimits = LatencyLimits()
    command_line: CommandLine | None = None
    stated_limits: Mapping[str, int] = field(default_factory=dict)
    addresses: frozenset[str] | None = None
    remote: bool = False
    rust_frontend: bool = False
    pids: frozenset[int] = frozenset()
    gpus: tuple[GpuSample, ...] | None = None
    model: ModelShape | None = None
    agent: AgentEvidence | None = None
    trial: TrialRequest | None = None
    unread: Mapping[EvidencePart, str] = field(default_factory=dict)

    @property
    def dialect(self) -> str | None:
        """The kind of engine, by its exposition or its command line; None if it is unknown."""
        if self.engine.sample is not None:
            return self.engine.sample.dialect
        return None if self.command_line is None else "vllm"

    def why_unread(self, part: EvidencePart) -> str:
        """Why a part is missing, in words."""
        return self.unread.get(part, f"the {part} says nothing of it")
