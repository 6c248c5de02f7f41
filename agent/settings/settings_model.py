"""The settings, section by section."""

import re
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from agent.catalog.definitions import DEFINITIONS
from agent.records.objective import Match, Objective, SessionLimits
from agent.records.prices import PriceList
from agent.settings.access import SecuritySettings, TlsSettings
from agent.settings.engine_settings import (
    DcgmSettings,
    DiscoverySettings,
    EngineSettings,
    NvmlSettings,
    RouterSettings,
)
from agent.settings.price_settings import (
    ElectricitySettings,
    PriceSettings,
    TokenBudgetSettings,
    price_list,
)
from agent.settings.values import (
    Address,
    AgentSocket,
    DatabaseUrl,
    Duration,
    HttpUrl,
    Number,
    OtlpUrl,
    Section,
    SqliteFile,
    TraceUrl,
    WholeNumber,
    known,
    masked,
)

PRESETS: Mapping[str, Mapping[str, float]] = {
    "interactive": {"ttft_ms": 500, "tpot_ms": 30},
    "chat": {"ttft_ms": 200, "tpot_ms": 120, "max_error_ratio": 0.001},
    "7b": {"ttft_ms": 100, "min_output_tokens_per_s": 1000},
    "13b": {"ttft_ms": 200, "min_output_tokens_per_s": 500},
    "70b": {"ttft_ms": 500, "min_output_tokens_per_s": 100},
}


class StorageSettings(Section):
    """The agent's file, the shared database, and the retention of rows (docs/storage.md)."""

    file: SqliteFile = "goodput.db"
    """The SQLite file that this agent writes: a path."""
    publish_to: DatabaseUrl | None = None
    """The shared database that everything in the file is published to:
    `postgresql://user:password@host/database` or
    `clickhousedb://user:password@host:8123/database`; null: none."""
    keep_requests: Duration = Field(default="7d")  # type: ignore[assignment]
    """How long single requests and samples stay."""
    keep_rollups: Duration = Field(default="400d")  # type: ignore[assignment]
    """How long rollups, minutes and events stay."""
    keep_in_file: Duration = Field(default="1d")  # type: ignore[assignment]
    """With `publish_to`, how long requests and samples stay in the file; those that still wait to
    be published then are dropped and counted."""
    max_bytes: WholeNumber = Field(default=2_147_483_648, ge=1_000_000)
    """With `publish_to`, bytes of the file's rows beyond which requests are refused, if all of
    them still wait."""
    query_timeout: Duration = Field(default="10s")  # type: ignore[assignment]
    """How long a query of the API may take; a longer one gets 503."""
    max_series: WholeNumber = Field(default=10_000, ge=1)
    """Series of models, tenants and lengths that figures distinguish; the rest is `other`."""
    on_corrupt: Literal["fail", "set_aside"] = "fail"
    """What is done with a SQLite file that is not a database; `set_aside` renames it."""

    @property
    def own_url(self) -> str:
        """The URL of the file, which this agent writes."""
        return f"sqlite:///{self.file}"

    @property
    def read_url(self) -> str:
        """The URL of the shared database, else of the file: what commands and `serve` read."""
        return self.publish_to or self.own_url

    @property
    def kept_in_file_s(self) -> float:
        """For how long the file has all requests."""
        kept_s = self.keep_requests
        return kept_s if self.publish_to is None else min(self.keep_in_file, kept_s)


# RFC 9110, section 5: a field's name is a token, and its value has no control characters.
_NAME = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"
_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")


def _text(value: object) -> object:
    """A number as YAML reads it, such as the tenant 42, as text."""
    return str(value) if isinstance(value, int) else value


def _header_value(value: SecretStr) -> SecretStr:
    if not _VALUE.fullmatch(value.get_secret_value()):
        raise ValueError("a header's value is of visible ASCII characters, with spaces inside only")
    return value


_PushHeaderName = Annotated[str, Field(pattern=_NAME)]
_HeaderValue = Annotated[SecretStr, BeforeValidator(_text), AfterValidator(_header_value)]


class OtlpMetricsSettings(Section):
    """The push of the agent's metrics over OTLP, beside `/metrics` (docs/metrics-push.md)."""

    endpoint: HttpUrl | None = None
    """Where metrics are sent as protobuf over HTTP, as in `http://collector:4318`; null: nowhere.

    A URL without a path gets `/v1/metrics`."""
    headers: dict[_PushHeaderName, _HeaderValue] = Field(default={})
    """Headers of each export, as in `{X-Scope-OrgID: fleet}`; their values are never shown."""
    interval: Duration = Field(default="15s")  # type: ignore[assignment]
    """Time between two exports."""
    timeout: Duration = Field(default="10s")  # type: ignore[assignment]
    """How long the endpoint may take to respond to an export."""
    compression: Literal["gzip", "none"] = "gzip"
    """How an export is compressed."""
    histograms: Literal["exponential", "explicit"] = "exponential"
    """How the latencies of requests are sent; `explicit` has the buckets of `/metrics`."""
    names: Literal["prometheus", "opentelemetry"] = "prometheus"
    """Names of the latencies of requests: those of `/metrics`, which this project's dashboards and
    alerts read, or those of OpenTelemetry's conventions, `gen_ai.server.*` and `gen_ai.client.*`.
    """
    max_buckets: WholeNumber = Field(default=160, ge=40, le=2400)
    """Buckets of an exponential histogram; if more are needed, two neighbours become one."""
    resource: dict[str, str] = Field(default={})
    """More attributes of the resource, as in `{k8s.cluster.name: eu-1}`; they replace those of
    `OTEL_RESOURCE_ATTRIBUTES`."""


_HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$", max_length=100)]


class OutlierSettings(Section):
    """When the proxy stops sending requests to an engine that fails."""

    enabled: bool = True
    """Whether engines that fail are taken out of the rotation."""
    failures: WholeNumber = Field(default=3, ge=1, le=1000)
    """Failed requests in a row after which a worker ejects an engine."""
    ejection: Duration = Field(default="10s")  # type: ignore[assignment]
    """How long an engine is first ejected, until a probe; each further time is twice as long."""
    max_ejection: Duration = Field(default="2m")  # type: ignore[assignment]
    """The longest ejection."""


class ProxySettings(Section):
    """The traced proxy; without `listen` there is none."""

    listen: Address | None = None
    """Address at which the proxy takes requests, as in `127.0.0.1:8080`."""
    workers: Literal["auto"] | Annotated[WholeNumber, Field(ge=1, le=64)] = 1
    """Processes of the proxy; `auto`: one for each four processor cores, at most 8."""
    engine: str | None = None
    """The one engine behind the proxy; null: all engines."""
    tenant_header: _HeaderName | None = None
    """Header with the tenant of a request; null: the tenant is a digest of the API key."""
    user_header: _HeaderName | None = None
    """Trusted header with the user of a request."""
    workload_header: _HeaderName | None = None
    """Trusted header with the workload of a request."""
    session_header: _HeaderName | None = None
    """Trusted header with the session of a request.

    Of a request without it: `prompt_cache_key` of the body, or a digest of vLLM's `cache_salt`."""
    tenants: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = ()
    """Tenants that figures always distinguish."""
    max_tenants: WholeNumber = Field(default=1000, ge=0, le=100_000)
    """How many further tenants figures distinguish; the rest is `other`."""
    count_tokens: bool = True
    """Whether engines are asked for the token counts of streams."""
    continuous_usage: bool = False
    """Whether engines are asked for the token counts of each chunk of a stream.

    Counts are stripped again for clients that asked for none."""
    return_request_id: bool = True
    """Whether the request id that the proxy made is sent to the client."""
    client_sampling: bool = True
    """Whether a client's sampled flag decides if spans of its request are forwarded."""
    trace_ratio: Number = Field(default=1.0, ge=0, le=1)
    """Share of the proxy's other spans that are forwarded; slow and failed ones always are."""
    join_wait: Duration = Field(default="10s")  # type: ignore[assignment]
    """How long a row waits for the engine's span."""
    drain: Duration = Field(default="30s")  # type: ignore[assignment]
    """How long streams may go on at a stop."""
    connect_timeout: Duration = Field(default="5s")  # type: ignore[assignment]
    """How long a connection to an engine may take."""
    answer_timeout: Duration | None = None
    """Limit from a request to the head of its response; null: none."""
    gap_timeout: Duration | None = None
    """Limit between two pieces of a response; null: none."""
    outlier_detection: OutlierSettings = OutlierSettings()
    retry: bool = True
    """Whether a request that an engine did not take is sent to another engine, once."""


# The names of all objectives of a request are in one row of the index `uq_rollup_series_key`, which
# PostgreSQL limits to 2,704 bytes.
MAX_OBJECTIVES = 20
MAX_OBJECTIVE_NAME = 48


class ListenSettings(Section):
    """The address of the web page, the API and the metrics."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Name or number of the network interface."""
    port: WholeNumber = Field(default=9470, ge=0, le=65535)
    """Port; 0: any free one."""


class OtlpSettings(Section):
    """The receivers of spans."""

    grpc: Address | None = "127.0.0.1:4317"
    """Address of the receiver over gRPC; null: off."""
    http: Address | None = "127.0.0.1:4318"
    """Address of the receiver over HTTP; null: off."""
    forward_to: OtlpUrl | None = None
    """Where exports are sent on, as in `http://host:4318` or `grpc://host:4317`.

    The bytes are the same, less the spans that clients of the proxy do not sample."""


class MatchSettings(Section):
    """The requests that an objective covers."""

    model: str = "*"
    """Shell glob of models."""
    tenant: str | None = None
    """Shell glob of tenants; null: all requests, those without a tenant included."""
    route: str | None = None
    """Shell glob of routes; null: all requests, those without a route included."""
    min_input_tokens: WholeNumber | None = Field(default=None, ge=0)
    """Fewest input tokens."""
    max_input_tokens: WholeNumber | None = Field(default=None, ge=0)
    """Most input tokens."""

    @field_validator("max_input_tokens")
    @classmethod
    def _matches_something(cls, longest: int | None, others: ValidationInfo) -> int | None:
        shortest = others.data.get("min_input_tokens")
        if longest is not None and shortest is not None and longest < shortest:
            raise ValueError(f"{longest} is below min_input_tokens, {shortest}: nothing can match")
        return longest


class SessionSettings(Section):
    """Limits on the turns of whole sessions, besides those on requests (docs/conversations.md)."""

    first_turn_ttft_ms: Number | None = Field(default=None, gt=0)
    """Limit on the TTFT of the first turn in milliseconds."""
    turn_ttft_ms: Number | None = Field(default=None, gt=0)
    """Limit on the TTFT of each later turn in milliseconds."""
    share_of_turns: Number = Field(default=0.95, gt=0, le=1)
    """Share of the later turns that must meet their limit."""

    @field_validator("turn_ttft_ms")
    @classmethod
    def _limits_something(cls, turn_ms: float | None, others: ValidationInfo) -> float | None:
        if turn_ms is None and others.data.get("first_turn_ttft_ms", "wrong") is None:
            raise ValueError("no limit is set; set first_turn_ttft_ms, turn_ttft_ms or both")
        return turn_ms

    def limits(self) -> SessionLimits:
        """The limits in seconds."""
        return SessionLimits(
            first_turn_ttft_s=_seconds(self.first_turn_ttft_ms),
            turn_ttft_s=_seconds(self.turn_ttft_ms),
            share_of_turns=self.share_of_turns,
        )


class ObjectiveSettings(Section):
    """An objective: limits, the share of requests that must meet them, and the window."""

    name: str = Field(min_length=1, max_length=MAX_OBJECTIVE_NAME, pattern=r"^[A-Za-z0-9_.-]+$")
    """The objective's name, unique among objectives."""
    preset: Annotated[str, known(PRESETS)] | None = None
    """Limits to start from: interactive, chat, 7b, 13b or 70b. Keys set here win."""
    match: MatchSettings = MatchSettings()
    ttft_ms: Number | None = Field(default=None, gt=0)
    """Limit on TTFT in milliseconds."""
    tpot_ms: Number | None = Field(default=None, gt=0)
    """Limit on TPOT in milliseconds."""
    e2e_ms: Number | None = Field(default=None, gt=0)
    """Limit on the time from arrival to the last token in milliseconds."""
    max_error_ratio: Number | None = Field(default=None, ge=0, lt=1)
    """Limit on the share of all requests that failed."""
    min_output_tokens_per_s: Number | None = Field(default=None, gt=0)
    """Least output tokens per second of all requests together."""
    session: SessionSettings | None = None
    target: Number = Field(default=0.95, gt=0, lt=1)
    """Share of judged requests that must meet the limits."""
    window: Duration = Field(default="30d")  # type: ignore[assignment]
    """Time over which the share counts."""
    compat: Annotated[str, known(DEFINITIONS)] = "goodput"
    """How edge cases are judged: goodput, vllm, aiperf, guidellm or inference-perf."""
    count_invalid: bool | None = None
    """Whether a client's own mistake (4xx) is a failure; null: as `compat` does."""

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, given: Any) -> Any:
        preset = given.get("preset") if isinstance(given, Mapping) else None
        return {**PRESETS.get(preset, {}), **given} if isinstance(preset, str) else given

    @field_validator("e2e_ms")
    @classmethod
    def _limits_something(cls, e2e_ms: float | None, others: ValidationInfo) -> float | None:
        # A key with a wrong value is absent from `others` and has a problem of its own.
        limits = [others.data.get(name, "wrong") for name in ("preset", "ttft_ms", "tpot_ms")]
        if e2e_ms is None and "wrong" not in limits and limits[1:] == [None, None]:
            raise ValueError("no limit is set; set at least one of ttft_ms, tpot_ms and e2e_ms")
        return e2e_ms

    def objective(self) -> Objective:
        """The objective in base units."""
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
            session=None if self.session is None else self.session.limits(),
            count_invalid=self.count_invalid,
        )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _masked(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_masked(inner) for inner in value]
    return masked(value) if isinstance(value, str) else value


class Settings(Section):
    """All settings."""

    name: str = Field(default_factory=socket.gethostname, min_length=1, max_length=100)
    """Identifies the agent if several share a database. The default is the host's name."""
    listen: ListenSettings = ListenSettings()
    otlp: OtlpSettings = OtlpSettings()
    otlp_metrics: OtlpMetricsSettings = OtlpMetricsSettings()
    http_proxy: HttpUrl | None = None
    """Proxy for `otlp.forward_to` and `otlp_metrics.endpoint`, as in `http://proxy:3128`.

    All other connections are direct; HTTP_PROXY and the like do not count."""
    trace_url: TraceUrl | None = None
    """Address of a trace in Tempo, Jaeger, Phoenix or another store of traces, for the page.

    `{trace_id}` stands for the id, and `{span_id}` for the span's, as in
    `https://jaeger.example/trace/{trace_id}`."""
    proxy: ProxySettings = ProxySettings()
    nvml: NvmlSettings = NvmlSettings()
    dcgm: DcgmSettings = DcgmSettings()
    storage: StorageSettings = StorageSettings()
    security: SecuritySettings = SecuritySettings()
    tls: TlsSettings = TlsSettings()
    engines: tuple[EngineSettings, ...] = ()
    """The inference servers that the agent watches."""
    agent_socket: AgentSocket = "auto"
    """The Unix socket for plugins of engines on this machine without a `plugin_socket`.

    A path, `none`, or `auto`: where the plugin looks, too (docs/vllm-plugin.md)."""
    engines_from: DiscoverySettings = DiscoverySettings()
    routers: tuple[RouterSettings, ...] = ()
    """Routers in front of the engines."""
    prices: tuple[PriceSettings, ...] = ()
    """The prices of GPUs."""
    electricity: ElectricitySettings | None = None
    token_budget: TokenBudgetSettings | None = None
    tenant_budgets: dict[str, Annotated[Number, Field(gt=0)]] = Field(default={})
    """Dollars that the requests of a tenant may cost in 30 days, by tenant."""
    objectives: tuple[ObjectiveSettings, ...] = Field(
        default=(ObjectiveSettings(name="chat", preset="chat"),), max_length=MAX_OBJECTIVES
    )
    """The objectives that requests are judged by."""

    @field_validator("dcgm")
    @classmethod
    def _one_source_of_gpus(cls, dcgm: DcgmSettings, others: ValidationInfo) -> DcgmSettings:
        nvml = others.data.get("nvml")
        both = (
            isinstance(nvml, NvmlSettings) and nvml.enabled and "enabled" in nvml.model_fields_set
        )
        if dcgm.url is not None and both:
            raise ValueError("GPUs are read from one source; remove nvml.enabled or dcgm.url")
        return dcgm

    @field_validator("security")
    @classmethod
    def _locks(cls, security: SecuritySettings, others: ValidationInfo) -> SecuritySettings:
        security.check_locked(others.data)
        return security

    @field_validator("engines")
    @classmethod
    def _hold_what_is_proxied(
        cls, engines: tuple[EngineSettings, ...], others: ValidationInfo
    ) -> tuple[EngineSettings, ...]:
        proxy = others.data.get("proxy", ProxySettings())
        names = [engine.name for engine in engines]
        if proxy.listen is not None and not names:
            raise ValueError("proxy.listen is set, and there is no engine for the proxy")
        if proxy.engine is not None and proxy.engine not in names:
            known = ", ".join(names) or "there are none"
            raise ValueError(f"proxy.engine {proxy.engine!r} is not one of them ({known})")
        return engines

    @field_validator("engines")
    @classmethod
    def _have_sockets_of_their_own(
        cls, engines: tuple[EngineSettings, ...]
    ) -> tuple[EngineSettings, ...]:
        paths = Counter(engine.plugin_socket for engine in engines if engine.plugin_socket)
        for path, count in paths.items():
            if count > 1:
                raise ValueError(f"{count} engines have the plugin_socket {path}; each needs one")
        return engines

    @field_validator("engines_from")
    @classmethod
    def _without_a_proxy(
        cls, discovery: DiscoverySettings, others: ValidationInfo
    ) -> DiscoverySettings:
        proxy = others.data.get("proxy", ProxySettings())
        if discovery.kubernetes is not None and proxy.listen is not None:
            raise ValueError("engines that are found have no proxy; remove proxy.listen")
        return discovery

    @field_validator("prices")
    @classmethod
    def _are_of_what_there_is(
        cls, prices: tuple[PriceSettings, ...], others: ValidationInfo
    ) -> tuple[PriceSettings, ...]:
        engines = others.data.get("engines", ())
        names = [engine.name for engine in engines]
        for place, price in enumerate(prices):
            if price.engine is not None and "engines" in others.data and price.engine not in names:
                known = ", ".join(names) or "there are none"
                raise ValueError(
                    f"prices[{place}] is of the engine {price.engine!r}; known engines: {known}"
                )
        price_list(prices, engines=[(engine.name, engine.gpu_hour_usd) for engine in engines])
        return prices

    def known_tenants(self) -> frozenset[str]:
        """The tenants that the settings name, in the proxy's list or in an objective."""
        matched = [objective.match.tenant for objective in self.objectives]
        named = [name for name in matched if name is not None and not set(name) & set("*?[")]
        return frozenset((*self.proxy.tenants, *named))

    def price_list(self) -> PriceList:
        """All prices, those of single engines included."""
        own = [(engine.name, engine.gpu_hour_usd) for engine in self.engines]
        return price_list(self.prices, self.electricity, own)

    @property
    def token_budget_usd(self) -> float | None:
        """The budget for a million output tokens; None if it is not set."""
        budget = self.token_budget
        return None if budget is None else budget.usd_per_million_output_tokens

    @property
    def reads_nvml(self) -> bool:
        """Whether GPUs are read through NVML, which dcgm-exporter replaces."""
        return self.nvml.enabled and self.dcgm.url is None

    def shown(self) -> dict[str, Any]:
        """The settings in force in the format of the file, with passwords masked."""
        shown: dict[str, Any] = _masked(self.model_dump(mode="json", by_alias=True))
        return shown

    def all_objectives(self) -> tuple[Objective, ...]:
        """The objectives in base units, in the order of the file."""
        is_preset = "objectives" not in self.model_fields_set
        return tuple(replace(each.objective(), is_preset=is_preset) for each in self.objectives)
