"""What an operator may set, section by section."""

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agent.catalog.definitions import DEFINITIONS
from agent.catalog.presets import PRESETS
from agent.records.objective import Match, Objective
from agent.settings.values import Address, Duration, HttpUrl, OtlpUrl

_PASSWORD = re.compile(r"(://[^:@/]*:)[^@/]*(@)")


class Section(BaseModel):
    """A part of the settings: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ListenSettings(Section):
    """Where the page, the API and the metrics are served."""

    host: str = "127.0.0.1"
    port: int = Field(default=9470, ge=0, le=65535)


class OtlpSettings(Section):
    """Where spans are received; None switches a receiver off. `forward_to` gets the same bytes."""

    grpc: Address | None = "127.0.0.1:4317"
    http: Address | None = "127.0.0.1:4318"
    forward_to: OtlpUrl | None = None


class ProxySettings(Section):
    """The traced proxy, which this version does not have: only the defaults are accepted."""

    listen: None = None
    engine: None = None


class StorageSettings(Section):
    """The database, and how long rows are kept."""

    url: str = "sqlite:///goodput.db"
    keep_requests: Duration = Field(default="7d")  # type: ignore[assignment]
    keep_rollups: Duration = Field(default="400d")  # type: ignore[assignment]


class EngineSettings(Section):
    """One inference server. `scrape_interval` is the time between two readings of its page."""

    name: str = Field(min_length=1, max_length=100)
    url: HttpUrl
    kind: Literal["auto", "vllm", "sglang", "tgi", "trtllm"] = "auto"
    scrape_interval: Duration = Field(default="5s")  # type: ignore[assignment]
    # pydantic keeps the name model_config for itself.
    model_config_path: Path | None = Field(default=None, alias="model_config")
    role: Literal["both", "prefill", "decode"] = "both"
    gpus: tuple[int | str, ...] = ()
    gpu_hour_usd: float | None = Field(default=None, gt=0)

    def unused(self) -> tuple[str, ...]:
        """The keys that are set although this version does not use them yet."""
        given = self.model_fields_set & {"model_config_path", "role", "gpus", "gpu_hour_usd"}
        meant = {name for name in given if getattr(self, name) not in (None, (), "both")}
        return tuple(
            sorted("model_config" if name == "model_config_path" else name for name in meant)
        )


class MatchSettings(Section):
    """Which requests an objective speaks of; `model`, `tenant` and `route` are shell globs."""

    model: str = "*"
    tenant: str | None = None
    route: str | None = None
    min_input_tokens: int | None = Field(default=None, ge=0)
    max_input_tokens: int | None = Field(default=None, ge=0)


class ObjectiveSettings(Section):
    """A promise: limits in milliseconds, the share that must meet them, and over what time."""

    name: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_.-]+$")
    preset: str | None = None
    match: MatchSettings = MatchSettings()
    ttft_ms: float | None = Field(default=None, gt=0)
    tpot_ms: float | None = Field(default=None, gt=0)
    e2e_ms: float | None = Field(default=None, gt=0)
    max_error_ratio: float | None = Field(default=None, ge=0, lt=1)
    min_output_tokens_per_s: float | None = Field(default=None, gt=0)
    target: float = Field(default=0.95, gt=0, lt=1)
    window: Duration = Field(default="30d")  # type: ignore[assignment]
    compat: str = "goodput"

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("preset") is None:
            return given
        preset = PRESETS.get(str(given["preset"]))
        if preset is None:
            known = ", ".join(PRESETS)
            raise ValueError(f"preset {given['preset']!r} is not known; known are {known}")
        return {**preset, **given}

    @model_validator(mode="after")
    def _promises_something(self) -> "ObjectiveSettings":
        if self.compat not in DEFINITIONS:
            known = ", ".join(DEFINITIONS)
            raise ValueError(f"compat {self.compat!r} is not known; known are {known}")
        if self.ttft_ms is self.tpot_ms is self.e2e_ms is None:
            raise ValueError("no limit is set; set at least one of ttft_ms, tpot_ms and e2e_ms")
        return self

    def objective(self) -> Objective:
        """The promise in base units."""
        return Objective(
            name=self.name,
            definition=DEFINITIONS[self.compat],
            target=self.target,
            window_s=self.window,
            match=Match(**self.match.model_dump()),
            ttft_s=_seconds(self.ttft_ms),
            tpot_s=_seconds(self.tpot_ms),
            e2e_s=_seconds(self.e2e_ms),
            max_error_ratio=self.max_error_ratio,
            min_output_tokens_per_s=self.min_output_tokens_per_s,
        )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


class Settings(Section):
    """Everything that an operator may set. `name` tells agents that share a database apart."""

    name: str = Field(default_factory=socket.gethostname, min_length=1, max_length=100)
    listen: ListenSettings = ListenSettings()
    otlp: OtlpSettings = OtlpSettings()
    proxy: ProxySettings = ProxySettings()
    storage: StorageSettings = StorageSettings()
    engines: tuple[EngineSettings, ...] = ()
    objectives: tuple[ObjectiveSettings, ...] = (ObjectiveSettings(name="chat", preset="chat"),)

    @model_validator(mode="after")
    def _names_are_unique(self) -> "Settings":
        for kind, names in (
            ("engines", [engine.name for engine in self.engines]),
            ("objectives", [objective.name for objective in self.objectives]),
        ):
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                raise ValueError(f"{kind}: the name {repeated[0]!r} stands twice; names are unique")
        return self

    def shown(self) -> dict[str, Any]:
        """The settings in force, as the file would say them, with passwords masked."""
        shown = self.model_dump(mode="json", by_alias=True)
        shown["storage"]["url"] = _PASSWORD.sub(r"\1***\2", shown["storage"]["url"])
        return shown

    def notices(self) -> tuple[str, ...]:
        """One sentence for every key that is set and not yet used."""
        return tuple(
            f"engines[{place}].{key}: is accepted, and this version does not use it"
            for place, engine in enumerate(self.engines)
            for key in engine.unused()
        )

    def promised(self) -> tuple[Objective, ...]:
        """The objectives in base units, in the order of the file."""
        return tuple(objective.objective() for objective in self.objectives)
