"""What an operator may set: defaults, then a YAML file, then environment variables."""

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from agent.catalog.definitions import DEFINITIONS
from agent.catalog.presets import PRESETS
from agent.errors import SettingsInvalid
from agent.records.objective import Match, Objective

ENVIRONMENT_PREFIX = "GOODPUT_"

_DURATION_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_PASSWORD = re.compile(r"(://[^:@/]*:)[^@/]*(@)")
_DURATION = re.compile(r"^(\d+(?:\.\d+)?)([smhdw])$")


def duration_s(value: object) -> float:
    """Seconds of a duration such as `30d`, `12h`, `5m` or `1.5s`; ValueError for anything else."""
    found = _DURATION.match(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"{value!r} is no duration; write a number and s, m, h, d or w, as in 30d")
    return float(found[1]) * _DURATION_UNITS_S[found[2]]


def _address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{value!r} is no address; write host:port, as in 127.0.0.1:4317")
    return value


def _http_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{value!r} is no URL of a server; write http://host:port")
    return value.rstrip("/")


def _otlp_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https", "grpc") or not parts.hostname:
        raise ValueError(
            f"{value!r} is no OTLP endpoint; write http://host:4318 or grpc://host:4317"
        )
    return value.rstrip("/")


Duration = Annotated[float, BeforeValidator(duration_s), Field(gt=0)]
Address = Annotated[str, AfterValidator(_address)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]
OtlpUrl = Annotated[str, AfterValidator(_otlp_url)]


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


def load(path: Path | None, environment: Mapping[str, str]) -> Settings:
    """The settings from a file and the environment; SettingsInvalid lists every problem found."""
    given = _read(path) if path is not None else {}
    problems: list[str] = []
    for name, value in sorted(environment.items()):
        if name.startswith(ENVIRONMENT_PREFIX):
            problem = _overlay(given, name, value)
            problems += [problem] if problem else []
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        problems += [_sentence(detail) for detail in error.errors()]
    if problems:
        raise SettingsInvalid(problems)
    return settings


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsInvalid([f"{path}: cannot be read: {error}"]) from error
    except yaml.YAMLError as error:
        raise SettingsInvalid([f"{path}: is no YAML: {error}"]) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsInvalid([f"{path}: holds a {type(content).__name__}, not a mapping of keys"])
    return content


def _overlay(given: dict[str, Any], name: str, value: str) -> str | None:
    """Set one environment variable in `given`; the answer is a problem, or None."""
    steps = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
    place: Any = given
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        key = _index(place, step)
        if key is None:
            return f"{name}: {step!r} is no place in a list; write the next number, starting at 0"
        if following is None:
            try:
                _put(place, key, yaml.safe_load(value))
            except yaml.YAMLError:
                return f"{name}: {value!r} is no YAML value"
        else:
            place = _descend(place, key, into_list=following.isdigit())
            if place is None:
                return f"{name}: {step!r} holds a single value in the file, so nothing can be set in it"
    return None


def _index(place: Any, step: str) -> str | int | None:
    if not isinstance(place, list):
        return step
    return int(step) if step.isdigit() and int(step) <= len(place) else None


def _put(place: Any, key: Any, value: Any) -> None:
    if isinstance(place, list) and key == len(place):
        place.append(value)
    else:
        place[key] = value


def _descend(place: Any, key: Any, *, into_list: bool) -> Any:
    absent = isinstance(place, list) and key == len(place)
    inner = None if absent else place[key] if isinstance(place, list) else place.get(key)
    if inner is None:
        inner = [] if into_list else {}
        _put(place, key, inner)
    return inner if isinstance(inner, (dict, list)) else None


def _sentence(detail: Any) -> str:
    where = "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" for step in detail["loc"]
    ).lstrip(".")
    if detail["type"] == "extra_forbidden":
        return f"{where}: is not a known key; remove it or correct its spelling"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] in ("value_error", "missing"):
        return f"{where}: {message}" if where else message
    return f"{where}: {message} (got {detail['input']!r})"
