"""Settings of one inference server."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from agent.catalog.precision import CacheDtype, WeightDtype
from agent.records.model import Parallelism
from agent.settings.limit_settings import LimitSettings
from agent.settings.section import Section
from agent.settings.values import Duration, Gpu, HttpUrl, Number, SocketPath, WholeNumber, known


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


class EngineSettings(Section):
    """One inference server."""

    name: str = Field(min_length=1, max_length=100)
    """The engine's name, unique among engines. Its spans carry it as `OTEL_SERVICE_NAME`."""
    url: HttpUrl
    """Where the engine answers, as in `http://127.0.0.1:8000`."""
    kind: Literal["auto", "vllm", "sglang", "tgi", "trtllm"] = "auto"
    """The program that runs there; `auto` tells it by its metrics."""
    scrape_interval: Duration = Field(default="5s")  # type: ignore[assignment]
    """Time between two polls."""
    # pydantic reserves the name model_config.
    model_config_path: Path | None = Field(default=None, alias="model_config")
    """The model's `config.json`, or its folder. Without it work and efficiency are unknown."""
    role: Literal["both", "prefill", "decode"] = "both"
    """The phases that run on this engine."""
    gpus: tuple[Gpu, ...] = ()
    """Indexes or UUIDs of its GPUs; empty: those that its processes are on."""
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
