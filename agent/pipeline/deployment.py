"""How one engine is deployed: its model, its GPUs and their prices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agent.analysis.efficiency.work import Role, Serving
from agent.catalog import engine_facts as fact
from agent.catalog.gpu_facts import MEMORY_TOTAL
from agent.catalog.hardware import GpuModel, Precision, recognise_gpu
from agent.catalog.reasons import FiguresMissing
from agent.records.engine import EngineSample
from agent.records.gpu import GpuSample
from agent.records.model import ModelShape, Parallelism, StoredWeights
from agent.records.prices import PriceList


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredGpu:
    """Configured figures of one GPU, which replace those of the hardware table; None if not set."""

    peak_flops_per_s: float | None = None
    bandwidth_bytes_per_s: float | None = None

    def applied_to(self, product: GpuModel) -> GpuModel:
        """The product with the configured figures."""
        if self.peak_flops_per_s is not None:
            peaks = dict.fromkeys(Precision, self.peak_flops_per_s)
            product = replace(product, peak_flops_per_s=peaks)
        if self.bandwidth_bytes_per_s is not None:
            product = replace(product, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s)
        return product

    @property
    def complete(self) -> bool:
        """Whether no figure of the table is needed."""
        return None not in (self.peak_flops_per_s, self.bandwidth_bytes_per_s)


# A GPU of which only the configured figures are known. Nothing here needs its memory size.
_UNNAMED = GpuModel(name="given", memory_bytes=0, bandwidth_bytes_per_s=0.0, peak_flops_per_s={})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeployment:
    """One engine. `gpus` returns the last samples of its GPUs; `named_gpus` counts configured ones.

    With `cache_configured` the width of the KV cache comes from the settings and not from the
    engine. `missing` is called with a reason and a sentence if figures are unknown or doubtful.
    """

    engine: str
    prices: PriceList
    gpus: Callable[[], Sequence[GpuSample]]
    missing: Callable[[FiguresMissing, str], None]
    model: ModelShape | None = None
    weights: StoredWeights | None = None
    cache_configured: bool = False
    configured_gpu: ConfiguredGpu = ConfiguredGpu()
    parallelism: Parallelism | None = None
    role: Role = Role.BOTH
    named_gpus: int = 0

    def billed_gpus(self, gpus: Sequence[GpuSample]) -> list[str | None]:
        """The product name of each GPU, None if no sample names it; empty if none is known."""
        if gpus:
            return [sample.name for sample in gpus]
        spread = 0 if self.parallelism is None else self.parallelism.gpus
        return [None] * (self.named_gpus or spread)

    def serving(
        self, gpus: Sequence[GpuSample], ranks: int, samples: Sequence[EngineSample] = ()
    ) -> Serving:
        """The model on its GPUs; `ranks` are the data-parallel ranks that the engine reports.

        Without configured parallelism, several GPUs are taken as tensor-parallel within each rank.
        `samples` are the engine's, in order.
        """
        spread = self.parallelism or _spread(len(gpus), ranks)
        self._compare(spread, len(gpus), ranks)
        return Serving(
            model=self._model(samples),
            weights=self.weights,
            gpu=self._product(gpus),
            parallelism=spread,
            role=self.role,
        )

    def _model(self, samples: Sequence[EngineSample]) -> ModelShape | None:
        widths = [sample.fact(fact.KV_VALUE_BYTES.name) for sample in samples]
        width = next((each for each in reversed(widths) if each is not None), None)
        if self.model is None or self.cache_configured or width is None:
            return self.model
        return replace(self.model, cache_bits=8 * width)

    def _compare(self, spread: Parallelism, seen: int, ranks: int) -> None:
        if seen and spread.gpus != seen:
            self.missing(
                FiguresMissing.GPUS_DIFFER,
                f"`parallelism` spreads it over {spread.gpus} GPUs, which its MFU and MBU are of, "
                f"and {seen} GPUs are seen, which its bill is for; correct `parallelism` or `gpus`",
            )
        if self.model is not None and ranks > 1 and spread.data != ranks:
            self.missing(
                FiguresMissing.RANKS_DIFFER,
                f"it reports {ranks} data-parallel ranks, and its MFU and MBU are of "
                f"{spread.data}; set `parallelism`",
            )

    def _product(self, gpus: Sequence[GpuSample]) -> GpuModel | None:
        if self.configured_gpu.complete:
            return self.configured_gpu.applied_to(_UNNAMED)
        names = sorted({sample.name for sample in gpus})
        if len(names) > 1:
            self.missing(
                FiguresMissing.GPUS_MIXED, f"its GPUs are of several kinds ({', '.join(names)})"
            )
        if any(sample.mig_instances for sample in gpus):
            self.missing(
                FiguresMissing.GPU_SLICED,
                "its GPU is divided by MIG, and no peak of a part is known",
            )
            return None
        return self._recognised(gpus) if len(names) == 1 else None

    def _recognised(self, gpus: Sequence[GpuSample]) -> GpuModel | None:
        """The product of these GPUs, which have one name."""
        memory = [sample.fact(MEMORY_TOTAL.name) for sample in gpus]
        products = [recognise_gpu(gpus[0].name, each) for each in memory]
        known = [product for product in products if product is not None]
        # The name is the same for all, so all recognised GPUs are the same product.
        if len(known) == len(products):
            return self.configured_gpu.applied_to(known[0])
        sizes = ", ".join(sorted({f"{each / 1e9:.0f}" for each in memory if each is not None}))
        shown = f" with {sizes} GB" if sizes else ""
        self.missing(
            FiguresMissing.GPU_UNKNOWN,
            f"no peak of its GPU {gpus[0].name!r}{shown} is known; set the engine's "
            "`peak_tflops` and `bandwidth_gb_per_s`",
        )
        return None


def _spread(gpus: int, ranks: int) -> Parallelism:
    if gpus < 2:
        return Parallelism()
    data = ranks if ranks > 0 and gpus % ranks == 0 else 1
    return Parallelism(tensor=gpus // data, data=data)
