"""How one engine is deployed: its model, its GPUs, and what these cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agent.analysis.efficiency.serving import Role, Serving
from agent.catalog import engine_facts as fact
from agent.catalog.gpu_facts import MEMORY_TOTAL
from agent.catalog.hardware import GpuModel, recognise_gpu
from agent.catalog.precision import Precision
from agent.catalog.reasons import FiguresMissing
from agent.records.engine import EngineSample
from agent.records.gpu import GpuSample
from agent.records.model import ModelShape, Parallelism
from agent.records.prices import PriceList


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredGpu:
    """What the settings say of one GPU, in place of our table; None where they say nothing."""

    peak_flops_per_s: float | None = None
    bandwidth_bytes_per_s: float | None = None

    def over(self, product: GpuModel) -> GpuModel:
        """The product with these figures."""
        if self.peak_flops_per_s is not None:
            peaks = dict.fromkeys(Precision, self.peak_flops_per_s)
            product = replace(product, peak_flops_per_s=peaks)
        if self.bandwidth_bytes_per_s is not None:
            product = replace(product, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s)
        return product

    @property
    def all_told(self) -> bool:
        """Whether nothing is asked of the table."""
        return None not in (self.peak_flops_per_s, self.bandwidth_bytes_per_s)


# Use is told by peaks alone; nothing here asks for its memory.
_UNNAMED = GpuModel(name="given", memory_bytes=0, bandwidth_bytes_per_s=0.0, peak_flops_per_s={})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeployment:
    """One engine. `gpus` are the last readings of its GPUs, `named_gpus` how many settings name.

    `cache_said` tells that settings say how wide the model's KV cache is, so that the engine's page
    is not asked. `missing` is told, by a short word and a sentence, why figures are unknown or
    doubtful.
    """

    engine: str
    prices: PriceList
    gpus: Callable[[], Sequence[GpuSample]]
    missing: Callable[[FiguresMissing, str], None]
    model: ModelShape | None = None
    cache_said: bool = False
    figures: ConfiguredGpu = ConfiguredGpu()
    parallelism: Parallelism | None = None
    role: Role = Role.BOTH
    named_gpus: int = 0

    def billed_gpus(self, seen: Sequence[GpuSample]) -> list[str | None]:
        """The product of each of its GPUs, None where it was not seen; empty if none is known."""
        if seen:
            return [sample.name for sample in seen]
        said = 0 if self.parallelism is None else self.parallelism.gpus
        return [None] * (self.named_gpus or said)

    def serving(
        self, seen: Sequence[GpuSample], ranks: int, readings: Sequence[EngineSample] = ()
    ) -> Serving:
        """What serves; `ranks` are the data-parallel ranks that the engine's page tells.

        GPUs of which the settings do not say how the model is spread are taken as tensor-parallel
        within each rank. `readings` are those of the page, in order.
        """
        spread = self.parallelism or _spread(len(seen), ranks)
        self._compare(spread, len(seen), ranks)
        return Serving(
            model=self._model(readings),
            gpu=self._product(seen),
            parallelism=spread,
            role=self.role,
        )

    def _model(self, readings: Sequence[EngineSample]) -> ModelShape | None:
        """The model with the KV cache that the engine says it has."""
        told = [reading.fact(fact.KV_VALUE_BYTES.name) for reading in readings]
        width = next((each for each in reversed(told) if each is not None), None)
        if self.model is None or self.cache_said or width is None:
            return self.model
        return replace(self.model, cache_bits=8 * width)

    def _compare(self, spread: Parallelism, seen: int, ranks: int) -> None:
        if seen and spread.gpus != seen:
            self.missing(
                FiguresMissing.GPUS_DIFFER,
                f"`parallelism` spreads it over {spread.gpus} GPUs, by which its use is told, and "
                f"{seen} of them are seen, which its bill is for; correct `parallelism` or `gpus`",
            )
        if self.model is not None and ranks > 1 and spread.data != ranks:
            self.missing(
                FiguresMissing.RANKS_DIFFER,
                f"its page tells {ranks} data-parallel ranks, and its use is told for "
                f"{spread.data}; say in `parallelism` how it is spread",
            )

    def _product(self, seen: Sequence[GpuSample]) -> GpuModel | None:
        if self.figures.all_told:
            return self.figures.over(_UNNAMED)
        names = sorted({sample.name for sample in seen})
        if len(names) > 1:
            self.missing(
                FiguresMissing.GPUS_MIXED, f"its GPUs are of several kinds ({', '.join(names)})"
            )
        if any(sample.mig_instances for sample in seen):
            self.missing(
                FiguresMissing.GPU_SLICED,
                "its GPU is divided by MIG, and no peak of a part is known",
            )
            return None
        return self._recognised(seen) if len(names) == 1 else None

    def _recognised(self, seen: Sequence[GpuSample]) -> GpuModel | None:
        """The product of these GPUs, which have one name."""
        memory = [sample.fact(MEMORY_TOTAL.name) for sample in seen]
        products = [recognise_gpu(seen[0].name, each) for each in memory]
        known = [product for product in products if product is not None]
        # One name has one row of the table, so that GPUs differ in whether it is theirs alone.
        if len(known) == len(products):
            return self.figures.over(known[0])
        sizes = ", ".join(sorted({f"{each / 1e9:.0f}" for each in memory if each is not None}))
        shown = f" with {sizes} GB" if sizes else ""
        self.missing(
            FiguresMissing.GPU_UNKNOWN,
            f"no peak of its GPU {seen[0].name!r}{shown} is known; set the engine's "
            "`peak_tflops` and `bandwidth_gb_per_s`",
        )
        return None


def _spread(gpus: int, ranks: int) -> Parallelism:
    if gpus < 2:
        return Parallelism()
    data = ranks if ranks > 0 and gpus % ranks == 0 else 1
    return Parallelism(tensor=gpus // data, data=data)
