"""The scenario of a simulated engine, read from YAML: its speed, its traffic, its faults."""

import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from random import Random
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from agent.catalog.causes import Cause
from agent.catalog.time_units import HOUR_S
from agent.errors import SettingsInvalid
from agent.settings.named_files import read_named_file
from agent.settings.yaml_values import read_yaml

DEFAULT_SCENARIO = resources.files("agent.simulator") / "scenarios" / "chat.yaml"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Ratio = Annotated[float, Field(ge=0, le=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenLengths(_Part):
    """A lognormal distribution of lengths in tokens, cut off at both ends."""

    median: Positive
    sigma: NotNegative
    min: Count
    max: Count

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.min <= self.median <= self.max:
            raise ValueError(
                f"median {self.median:g} must lie between min {self.min} and max {self.max}"
            )
        return self

    def draw(self, random: Random) -> int:
        """One length in tokens."""
        length = random.lognormvariate(math.log(self.median), self.sigma)
        # Limited as a float first: a wide sigma draws values that no int conversion takes.
        return round(min(max(length, self.min), self.max))


class TrafficPhase(_Part):
    """A time with one arrival rate; the phases of a scenario repeat in their order."""

    duration_s: Positive
    rate_per_s: NotNegative


class Prefill(_Part):
    """The speed of prefill."""

    tokens_per_s: Positive = 20_000.0
    floor_s: NotNegative = 0.012

    def duration_s(self, tokens: int) -> float:
        """Seconds of a step for this number of prompt tokens; 0 without prompt tokens."""
        return max(self.floor_s, tokens / self.tokens_per_s) if tokens else 0.0


class Decode(_Part):
    """The time of one decode step for all running requests."""

    base_s: NotNegative = 0.010
    per_running_s: NotNegative = 0.0003

    def duration_s(self, running: int) -> float:
        """Seconds of a step with one token for each of `running`; 0 without requests."""
        return self.base_s + self.per_running_s * running if running else 0.0


class KvCache(_Part):
    """The memory for keys and values, in blocks of a fixed number of tokens."""

    blocks: Count = 4096
    block_tokens: Count = 16


class Fault(_Part):
    """A fault of an engine; the defaults mean no fault.

    `surge` requests arrive for each planned one. Prefill takes `prefill_slowdown` times as long,
    decode `decode_slowdown` times, and every step `step_slowdown` times. So do steps with
    `gpu_slowdown`, because heat throttles the GPU: its clock falls, and NVML names the reason. A
    `defer_ratio` of the requests is not scheduled before `defer_s`, like a request that waits for
    its grammar or its LoRA. The front takes `front_s` more before the queue. An `error_ratio` of
    all requests gets a 500. `kv_taken` is a share of the KV cache that no request can use, and
    `max_num_seqs` fewer slots than the scenario's. A `long_ratio` of the planned requests has
    prompts of `long_tokens`, and a `long_output_ratio` responses of `long_output_tokens`. A
    `slow_client_ratio` of the clients reads nothing for `client_pause_s` after the first bytes of
    the response, which has all logprobs and so is larger than the buffers on its way. With
    `cache_lost` the prefix cache has nothing. With `hang` the engine stops its steps, and its
    exposition stays as it is. An engine that is `dead` loses its requests, refuses connections,
    and starts anew when the fault ends.
    """

    surge: Count = 1
    prefill_slowdown: Positive = 1.0
    decode_slowdown: Positive = 1.0
    step_slowdown: Positive = 1.0
    gpu_slowdown: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    defer_ratio: Ratio = 0.0
    defer_s: NotNegative = 0.0
    error_ratio: Ratio = 0.0
    kv_taken: Ratio = 0.0
    front_s: NotNegative = 0.0
    max_num_seqs: Count | None = None
    long_ratio: Ratio = 0.0
    long_tokens: Count = 1
    long_output_ratio: Ratio = 0.0
    long_output_tokens: Count = 1
    slow_client_ratio: Ratio = 0.0
    client_pause_s: NotNegative = 0.0
    cache_lost: bool = False
    hang: bool = False
    dead: bool = False


class ScriptedFault(Fault):
    """A fault that begins `after_s` from the engine's start and lasts `for_s`.

    It comes again every `every_s`. `name` says what it is. One of `causes` is right,
    mostly the first, of the requests that miss by it.
    """

    after_s: NotNegative
    for_s: Positive
    every_s: Positive | None = None
    name: str = ""
    causes: tuple[Cause, ...] = ()

    def holds_at(self, at_s: float) -> bool:
        """Whether the fault is active at a time of the engine."""
        since_s = at_s - self.after_s
        if since_s < 0:
            return False
        return (since_s if self.every_s is None else since_s % self.every_s) < self.for_s

    def begins_from(self, at_s: float) -> float:
        """When it next begins, at `at_s` or later; infinity if it does not."""
        return self._next(self.after_s, at_s)

    def next_change_s(self, at_s: float) -> float:
        """When it next begins or ends after `at_s`; infinity if it does not."""
        later_s = math.nextafter(at_s, math.inf)
        return min(self._next(edge, later_s) for edge in (self.after_s, self.after_s + self.for_s))

    def _next(self, edge_s: float, at_s: float) -> float:
        """The first time from `at_s` on that is `edge_s`, or whole periods later."""
        if edge_s >= at_s:
            return edge_s
        if self.every_s is None:
            return math.inf
        return edge_s + math.ceil((at_s - edge_s) / self.every_s) * self.every_s

    def faster(self, scale: float) -> "ScriptedFault":
        """The same fault in shorter times."""
        times = {name: getattr(self, name) for name in _TIMES}
        given = {name: time_s for name, time_s in times.items() if time_s is not None}
        return self.model_copy(update={name: time_s / scale for name, time_s in given.items()})


_TIMES = ("after_s", "for_s", "every_s", "defer_s", "front_s")


class SimulatedGpu(_Part):
    """The GPU of an engine, and what a token of the model needs of it."""

    name: str
    uuid: str
    parameters: Positive
    weight_bytes: Positive
    kv_bytes_per_token: Positive
    flops_per_s: Positive
    bytes_per_s: Positive
    memory_bytes: Positive
    memory_used_bytes: Positive
    idle_watts: Positive
    limit_watts: Positive


class Scenario(_Part):
    """One simulated engine and its traffic. The defaults are the packaged `chat.yaml`."""

    seed: int = 7
    model: str = "simulated-chat-8b"
    max_model_len: Count = 8192
    arrival_rate: Positive | tuple[TrafficPhase, ...] = (
        TrafficPhase(duration_s=240.0, rate_per_s=3.0),
        TrafficPhase(duration_s=60.0, rate_per_s=7.0),
    )
    input_tokens: TokenLengths = TokenLengths(median=600, sigma=0.9, min=16, max=6000)
    output_tokens: TokenLengths = TokenLengths(median=160, sigma=0.7, min=1, max=1024)
    prefill: Prefill = Prefill()
    decode: Decode = Decode()
    max_num_seqs: Count = 64
    max_num_batched_tokens: Count = 2048
    kv_cache: KvCache = KvCache()
    cached_ratio: Ratio = 0.0
    abort_ratio: Ratio = 0.02
    tenants: tuple[str, ...] = ()
    gpu: SimulatedGpu | None = None
    faults: tuple[ScriptedFault, ...] = ()
    time_scale: Positive = 1.0

    @field_validator("model")
    @classmethod
    def _labelled(cls, model: str) -> str:
        if "simulated" not in model:
            raise ValueError(
                "the name must contain 'simulated', so that it does not pass as a real model"
            )
        return model

    @field_validator("arrival_rate")
    @classmethod
    def _some_traffic(
        cls, rate: float | tuple[TrafficPhase, ...]
    ) -> float | tuple[TrafficPhase, ...]:
        if isinstance(rate, tuple) and not any(phase.rate_per_s for phase in rate):
            raise ValueError("at least one phase needs a rate_per_s above 0")
        return rate

    @model_validator(mode="after")
    def _fits(self) -> Self:
        longest = self.input_tokens.max + self.output_tokens.max
        if longest > self.max_model_len:
            raise ValueError(
                f"input_tokens.max + output_tokens.max is {longest}, "
                f"more than max_model_len {self.max_model_len}"
            )
        if self.max_model_len > self.kv_cache.blocks * self.kv_cache.block_tokens:
            raise ValueError(
                f"one request of max_model_len {self.max_model_len} tokens does not fit "
                f"into kv_cache of {self.kv_cache.blocks} x {self.kv_cache.block_tokens} tokens"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be "
                f"at least max_num_seqs {self.max_num_seqs}"
            )
        return self

    @property
    def phases(self) -> tuple[TrafficPhase, ...]:
        """The arrival rate as phases that repeat; a single rate is one phase of an hour."""
        if isinstance(self.arrival_rate, tuple):
            return self.arrival_rate
        return (TrafficPhase(duration_s=HOUR_S, rate_per_s=self.arrival_rate),)

    def in_real_time(self) -> "Scenario":
        """The same scenario with its rates and durations scaled by `time_scale`.

        A time scale of 10 is an engine ten times as fast under ten times the traffic. Measured
        times are real seconds.
        """
        scale = self.time_scale
        faster = {
            "arrival_rate": tuple(
                TrafficPhase(
                    duration_s=phase.duration_s / scale, rate_per_s=phase.rate_per_s * scale
                )
                for phase in self.phases
            ),
            "prefill": Prefill(
                tokens_per_s=self.prefill.tokens_per_s * scale,
                floor_s=self.prefill.floor_s / scale,
            ),
            "decode": Decode(
                base_s=self.decode.base_s / scale,
                per_running_s=self.decode.per_running_s / scale,
            ),
            "faults": tuple(fault.faster(scale) for fault in self.faults),
            "time_scale": 1.0,
        }
        return self.model_copy(update=faster)


def load_scenario(path: Path | None = None) -> Scenario:
    """The scenario in `path`, or the packaged one; SettingsInvalid lists every problem."""
    source = Path(str(DEFAULT_SCENARIO)) if path is None else path
    try:
        document = read_yaml(read_named_file(source).decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsInvalid([f"{source}: cannot be read: {error}"]) from error
    if document.problems:
        raise SettingsInvalid([f"{source}:{each.line}: {each.text}" for each in document.problems])
    return _validated(str(source), {} if document.value is None else document.value)


def _validated(source: str, content: Any) -> Scenario:
    try:
        return Scenario.model_validate(content)
    except ValidationError as error:
        problems = (
            f"{source}: {'.'.join(map(str, item['loc'])) or 'scenario'}: "
            f"{item['msg'].removeprefix('Value error, ')} (got {_shortened(item['input'])})"
            for item in error.errors(include_url=False)
        )
        raise SettingsInvalid(list(problems)) from error


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_NO_FAULT = Fault()


class Faults:
    """The fault of one engine; of several scripted faults at one time the first counts."""

    def __init__(self, script: Sequence[ScriptedFault] = ()) -> None:
        self._script = tuple(script)
        self._set: Fault | None = None

    def set(self, fault: Fault) -> None:
        """Set a fault that replaces the script from now on."""
        self._set = fault

    def next_change_s(self, at_s: float) -> float:
        """When the script next changes after `at_s`; infinity if it does not."""
        return min((each.next_change_s(at_s) for each in self._script), default=math.inf)

    def throttled_s(self, since_s: float, until_s: float) -> float:
        """For how long the GPU is throttled between two times of the engine."""
        throttled_s, at_s = 0.0, since_s
        while at_s < until_s:
            edge_s = min(until_s, self.next_change_s(at_s))
            throttled_s += edge_s - at_s if self.at(at_s).gpu_slowdown > 1 else 0.0
            at_s = edge_s
        return throttled_s

    def at(self, at_s: float) -> Fault:
        """The fault at a time of the engine."""
        if self._set is not None:
            return self._set
        return next((fault for fault in self._script if fault.holds_at(at_s)), _NO_FAULT)
