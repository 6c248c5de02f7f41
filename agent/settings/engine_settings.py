"""Settings of engines, of their discovery, and of the sources that read GPUs."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agent.catalog import engine_facts as fact
from agent.catalog.dcgm_fields import DcgmField
from agent.catalog.hardware import CacheDtype, WeightDtype
from agent.errors import SettingsInvalid
from agent.records.model import Parallelism
from agent.settings.values import (
    Duration,
    Gpu,
    HttpUrl,
    Number,
    Section,
    SocketPath,
    WholeNumber,
    known,
)


class LimitSettings(Section):
    """Limits of one data-parallel rank, for engines whose exposition does not contain them."""

    running_requests: WholeNumber | None = Field(default=None, ge=1)
    """Most requests that may run at once; vLLM's `--max-num-seqs`."""
    step_tokens: WholeNumber | None = Field(default=None, ge=1)
    """Most tokens that one step may compute; vLLM's `--max-num-batched-tokens`."""
    context_tokens: WholeNumber | None = Field(default=None, ge=1)
    """Most tokens of one request, input and output; vLLM's `--max-model-len`."""

    def by_fact(self) -> dict[str, int]:
        """The limits that are set, by the name of their fact."""
        limits = {
            fact.MAX_RUNNING_REQUESTS.name: self.running_requests,
            fact.MAX_STEP_TOKENS.name: self.step_tokens,
            fact.MAX_CONTEXT_TOKENS.name: self.context_tokens,
        }
        return {name: limit for name, limit in limits.items() if limit is not None}


class ParallelismSettings(Section):
    """How a model is spread over GPUs; unset: tensor-parallel within each rank."""

    tensor: WholeNumber = Field(default=1, ge=1)
    """GPUs that share each layer."""
    pipeline: WholeNumber = Field(default=1, ge=1)
    """Groups of layers, each on GPUs of its own."""
    data: WholeNumber = Field(default=1, ge=1)
    """Copies of the model, which take different requests."""

    def parallelism(self) -> Parallelism:
        """The same as a record."""
        return Parallelism(tensor=self.tensor, pipeline=self.pipeline, data=self.data)


_Pod = Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[a-z0-9.-]+$", max_length=320)]


class EngineSettings(Section):
    """One inference server."""

    name: str = Field(min_length=1, max_length=100)
    """The engine's name, unique among engines. Its spans carry it as `OTEL_SERVICE_NAME`."""
    url: HttpUrl
    """Where the engine answers, as in `http://127.0.0.1:8000`."""
    kind: Literal["auto", "vllm", "sglang", "tgi", "trtllm", "llamacpp"] = "auto"
    """The program that runs there; `auto` detects it by its metrics."""
    scrape_interval: Duration = Field(default="5s")  # type: ignore[assignment]
    """Time between two polls."""
    # pydantic reserves the name model_config.
    model_config_path: Path | None = Field(default=None, alias="model_config")
    """The model's `config.json`, or its folder. Without it work and efficiency are unknown."""
    role: Literal["both", "prefill", "decode"] = "both"
    """The phases that run on this engine."""
    gpus: tuple[Gpu, ...] = ()
    """Indexes or UUIDs of its GPUs; empty: those that its processes are on, or that its pod has."""
    pod: _Pod | None = None
    """Its pod as `namespace/pod`: it owns the GPUs that a dcgm-exporter shows as the pod's."""
    parallelism: ParallelismSettings | None = None
    dtype: Annotated[str, known(WeightDtype)] | None = None
    """Type of the weights if not the config's: bf16, fp16, fp32, fp8, int8, int4 or fp4."""
    kv_dtype: Annotated[str, known(CacheDtype)] | None = None
    """Type of the KV cache: bf16, fp16 or fp8. Null: the engine's, else the config's."""
    peak_tflops: Number | None = Field(default=None, gt=0)
    """Dense peak of one GPU in TFLOP/s, in place of the agent's table."""
    bandwidth_gb_per_s: Number | None = Field(default=None, gt=0)
    """Memory bandwidth of one GPU in GB/s, in place of the agent's table."""
    gpu_hour_usd: Number | None = Field(default=None, ge=0)
    """Price of each of its GPUs in dollars per hour. Without a price nothing has a cost."""
    limits: LimitSettings = LimitSettings()
    log: Path | None = None
    """Its log file or a named pipe, in which the cause of a death is found."""
    pids: tuple[Annotated[int, Field(strict=True, gt=0)], ...] = ()
    """Its processes; empty: those that listen on its port."""
    same_machine: bool | None = None
    """Whether it runs on the agent's machine; null: as its URL shows."""
    hang_after: Duration = Field(default="30s")  # type: ignore[assignment]
    """Requests without progress for this long are a hang."""
    plugin_socket: SocketPath | None = None
    """The Unix socket at which the agent listens for the plugin `goodput-agent-vllm`."""


class RouterSettings(Section):
    """A router in front of the engines, whose own metrics the agent reads (docs/routers.md)."""

    name: str = Field(min_length=1, max_length=100)
    """The router's name, unique among routers."""
    url: HttpUrl
    """Where its metrics are, as in `http://epp:9090/metrics`."""
    scrape_interval: Duration = Field(default="10s")  # type: ignore[assignment]
    """Time between two polls."""


_Port = Annotated[WholeNumber, Field(ge=1, le=65535)]
_PortName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=15)]
_Namespace = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)]


class KubernetesSettings(Section):
    """Engines in the pods that a label selects; unset: none are looked for (docs/kubernetes.md)."""

    selector: str = Field(min_length=1, max_length=1000)
    """The label selector of the pods, as in `app.kubernetes.io/name=vllm`."""
    namespaces: tuple[_Namespace, ...] = ()
    """The namespaces of the pods; empty: all, for which the agent needs rights in the cluster."""
    node: str | None = Field(default=None, min_length=1, max_length=253)
    """The node of the pods; null: any."""
    port: _Port | _PortName = 8000
    """The engine's port in the pod: its number, or the name that a container gives it."""
    name: Literal["pod", "namespace/pod"] = "pod"
    """What an engine is named after. Its spans must carry the same as `OTEL_SERVICE_NAME`."""
    kind: Literal["auto", "vllm", "sglang", "tgi", "trtllm", "llamacpp"] = "auto"
    """The program that runs there; `auto` detects it by its metrics."""
    role_label: str = Field(default="llm-d.ai/role", min_length=1, max_length=317)
    """The label of pods that says `prefill` or `decode`; with another value or none: both."""
    scrape_interval: Duration = Field(default="5s")  # type: ignore[assignment]
    """Time between two polls of an engine."""
    model_config_path: Path | None = Field(default=None, alias="model_config")
    """The `config.json` of these pods' model, or its folder. Without it efficiency is unknown."""
    api: HttpUrl | None = None
    """The API server; null: that of the cluster in which the agent runs."""
    service_account: str = "/var/run/secrets/kubernetes.io/serviceaccount"
    """The folder with the `token` and the `ca.crt` of the agent's service account."""


class DiscoverySettings(Section):
    """Where engines are found while the agent runs, beside those of `engines`."""

    kubernetes: KubernetesSettings | None = None


class NvmlSettings(Section):
    """Reading GPUs through NVML, on a machine that has GPUs."""

    enabled: bool = True
    """Whether GPUs are read through NVML."""
    poll_interval: Duration = Field(default="1s")  # type: ignore[assignment]
    """Time between two polls."""


class DcgmFieldSettings(Section):
    """A series of dcgm-exporter that gives one of our facts, beside the built-in ones."""

    series: str = Field(min_length=1, max_length=200)
    """The name of the series."""
    fact: str
    """The metric that it gives, as in `gpu_clock_hertz`."""
    labels: tuple[str, ...] = ()
    """The values of the metric's own labels."""
    scale: Number = Field(default=1.0, gt=0)
    """The metric is the value of the series times this."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        try:
            self.field()
        except SettingsInvalid as error:
            raise ValueError("; ".join(error.problems)) from error
        return self

    def field(self) -> DcgmField:
        """The row for the table of series."""
        return DcgmField(series=self.series, fact=self.fact, labels=self.labels, scale=self.scale)


class DcgmSettings(Section):
    """Reading GPUs from dcgm-exporter or AMD's device-metrics-exporter instead of NVML."""

    url: HttpUrl | None = None
    """Where the exporter is scraped, as in `http://node:9400/metrics`, or AMD's at port 5000; null:
    NVML is read."""
    poll_interval: Duration = Field(default="10s")  # type: ignore[assignment]
    """Time between two polls."""
    fields: tuple[DcgmFieldSettings, ...] = ()
    """Series that give our metrics, beside the built-in ones."""
    pod: _Pod | None = None
    """Only GPUs of this pod are read, as `namespace/pod`; null: all that the exporter shows."""
