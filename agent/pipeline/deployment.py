"""How one engine is deployed: its model, its GPUs, and what these cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent.analysis.efficiency.serving import Role, Serving
from agent.catalog.hardware import GpuModel, find_gpu
from agent.records.gpu import GpuSample
from agent.records.model import ModelShape, Parallelism
from agent.records.prices import PriceList


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One engine. `gpus` are the last readings of its GPUs, `named_gpus` how many settings name.

    `missing` is told, by a short word and a sentence, why figures cannot be told.
    """

    engine: str
    prices: PriceList
    gpus: Callable[[], Sequence[GpuSample]]
    missing: Callable[[str, str], None]
    model: ModelShape | None = None
    parallelism: Parallelism | None = None
    role: Role = Role.BOTH
    named_gpus: int = 0

    def billed_gpus(self, seen: Sequence[GpuSample]) -> list[str | None]:
        """The product of each of its GPUs, None where it was not seen; empty if none is known."""
        if seen:
            return [sample.name for sample in seen]
        said = 0 if self.parallelism is None else self.parallelism.gpus
        return [None] * (self.named_gpus or said)

    def serving(self, seen: Sequence[GpuSample], ranks: int) -> Serving:
        """What serves; `ranks` are the data-parallel ranks that the engine's page tells.

        GPUs of which the settings do not say how the model is spread are taken as tensor-parallel
        within each rank.
        """
        return Serving(
            model=self.model,
            gpu=self._product(seen),
            parallelism=self.parallelism or _spread(len(seen), ranks),
            role=self.role,
        )

    def _product(self, seen: Sequence[GpuSample]) -> GpuModel | None:
        names = sorted({sample.name for sample in seen})
        if len(names) > 1:
            self.missing("gpus_mixed", f"its GPUs are of several kinds ({', '.join(names)})")
        if any(sample.mig_instances for sample in seen):
            self.missing("gpu_sliced", "its GPU is divided by MIG, and no peak of a part is known")
            return None
        if len(names) != 1:
            return None
        product = find_gpu(names[0])
        if product is None:
            self.missing("gpu_unknown", f"no peak of its GPU {names[0]!r} is known")
        return product


def _spread(gpus: int, ranks: int) -> Parallelism:
    if gpus < 2:
        return Parallelism()
    data = ranks if ranks > 0 and gpus % ranks == 0 else 1
    return Parallelism(tensor=gpus // data, data=data)
