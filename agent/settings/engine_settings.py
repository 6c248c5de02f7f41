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
    """The number of GPUs of a model, for each of three kinds of parallelism."""

    tensor: WholeNumber = Field(default=1, ge=1)
    pipeline: WholeNumber = Field(default=1, ge=1)
    data: WholeNumber = Field(default=1, ge=1)

    def parallelism(self) -> Parallelism:
        """The same as a record."""
        return Parallelism(tensor=self.tensor, pipeline=self.pipeline, data=self.data)


class EngineSettings(Section):
    """One inference server. `scrape_interval` is the time between two polls.

    `gpus` are its GPUs, if its processes do not show them. `log` is its log file or a named pipe.
    `pids` are its processes, if its port does not show them. `same_machine` says whether it runs
    on the agent's machine, if its URL does not show that. Requests without progress for
    `hang_after` are a hang. `model_config` is the model's config.json or its folder, `parallelism`
    the number of its GPUs. `dtype` and `kv_dtype` are the types of the weights and of the KV cache,
    if they differ from the config. `peak_tflops` (dense) and `bandwidth_gb_per_s` are those of one
    GPU and replace the agent's table. `gpu_hour_usd` is the price of each GPU per hour. `limits`
    are those of its start, if neither its exposition nor its command line shows them. At
    `plugin_socket` the agent listens for its plugin, `goodput-agent-vllm`.
    """

    name: str = Field(min_length=1, max_length=100)
    url: HttpUrl
    kind: Literal["auto", "vllm", "sglang", "tgi", "trtllm"] = "auto"
    scrape_interval: Duration = Field(default="5s")  # type: ignore[assignment]
    # pydantic reserves the name model_config.
    model_config_path: Path | None = Field(default=None, alias="model_config")
    role: Literal["both", "prefill", "decode"] = "both"
    gpus: tuple[Gpu, ...] = ()
    parallelism: ParallelismSettings | None = None
    dtype: Annotated[str, known(WeightDtype)] | None = None
    kv_dtype: Annotated[str, known(CacheDtype)] | None = None
    peak_tflops: Number | None = Field(default=None, gt=0)
    bandwidth_gb_per_s: Number | None = Field(default=None, gt=0)
    gpu_hour_usd: Number | None = Field(default=None, ge=0)
    limits: LimitSettings = LimitSettings()
    log: Path | None = None
    pids: tuple[Annotated[int, Field(strict=True, gt=0)], ...] = ()
    same_machine: bool | None = None
    hang_after: Duration = Field(default="30s")  # type: ignore[assignment]
    plugin_socket: SocketPath | None = None
