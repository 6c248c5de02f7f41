"""The GPUs of one exporter's page, in our facts."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agent.catalog.dcgm_fields import DIVIDED_FACTS, DcgmField, is_blank
from agent.records.gpu import Facts, MigInstance
from agent.sources.dcgm.rows import (
    UNKNOWN_INDEX,
    Entity,
    RowUnusable,
    entity_of,
    index_of,
    name_of,
    pod_labels,
)
from agent.sources.dcgm.xids import XID_SERIES, Told, XidSource, levels
from agent.sources.engines.exposition import Exposition

Rows = list[tuple[Mapping[str, str], float]]

# Far more than a host has, for pages of several hosts; a broken page must not fill the memory.
MOST_GPUS = 1024
# "3g.40gb" and "1c.3g.40gb" have three of the GPU's slices.
_SLICES = re.compile(r"(?:^|\.)([0-9]{1,2})g\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One GPU on a page. A `silent` one stands there without a value, its Xids apart."""

    gpu: str
    index: int
    name: str
    facts: Facts
    instances: tuple[MigInstance, ...]
    xids: Told
    silent: bool


@dataclass(frozen=True, slots=True)
class Readings:
    """All GPUs of a page, and how many lines, rows or numbers were dropped, by reason."""

    gpus: tuple[GpuReading, ...]
    dropped: Mapping[str, int]


@dataclass(slots=True)
class _Seen:
    """What the rows of one GPU say before they are translated."""

    index: int = UNKNOWN_INDEX
    name: str = ""
    profiles: dict[int, str] = field(default_factory=dict)
    rows: dict[tuple[int | None, str], Rows] = field(default_factory=dict)

    def add(self, entity: Entity, series: str, labels: Mapping[str, str], value: float) -> None:
        self.name = self.name or name_of(labels)
        if self.index == UNKNOWN_INDEX:
            self.index = index_of(labels)
        if entity.instance is not None:
            self.profiles.setdefault(entity.instance, labels.get("GPU_I_PROFILE", ""))
        self.rows.setdefault((entity.instance, series), []).append((labels, value))


def wanted_series(fields: Iterable[DcgmField]) -> frozenset[str]:
    """The names that a page is read for."""
    told = {name for each in fields for name in (each.series, each.beside) if name}
    return XID_SERIES | told


def read_gpus(
    page: Exposition, fields: Sequence[DcgmField], known: Collection[str] = ()
) -> Readings:
    """Each GPU that a row is about, in the order of the page.

    Of too many GPUs those in `known` come first. Rows of one GPU for several pods count once.
    """
    dropped = Counter(page.dropped)
    seen = _seen(page, known, dropped)
    gpus = tuple(_Translation(gpu, told, dropped).reading(fields) for gpu, told in seen.items())
    return Readings(gpus, dict(dropped))


def _seen(page: Exposition, known: Collection[str], dropped: Counter[str]) -> dict[str, _Seen]:
    seen: dict[str, _Seen] = {}
    places = MOST_GPUS - len(known)
    for series, samples in page.series.items():
        for sample in samples:
            try:
                entity = entity_of(sample.labels)
            except RowUnusable as row:
                dropped[row.reason] += 1
                continue
            if entity.gpu not in seen and entity.gpu not in known:
                if places <= 0:
                    dropped["too_many_gpus"] += 1
                    continue
                places -= 1
            seen.setdefault(entity.gpu, _Seen()).add(entity, series, sample.labels, sample.value)
    return seen


class _Translation:
    """One GPU's rows on their way into facts."""

    def __init__(self, gpu: str, seen: _Seen, dropped: Counter[str]) -> None:
        self._gpu = gpu
        self._seen = seen
        self._dropped = dropped
        self._values = self._all_values()

    def reading(self, fields: Sequence[DcgmField]) -> GpuReading:
        facts = self._facts(None, fields)
        instances = []
        for instance in sorted(self._seen.profiles):
            told = self._facts(instance, fields)
            divided = {key: value for key, value in told.items() if key[0] in DIVIDED_FACTS}
            # Without rows of its own the GPU is told by those of its instances.
            for key in told.keys() - divided.keys():
                facts.setdefault(key, told[key])
            instances.append(self._mig_instance(instance, divided))
        return GpuReading(
            gpu=self._gpu,
            index=self._seen.index,
            name=self._seen.name,
            facts=facts,
            instances=tuple(instances),
            xids=self._xids(),
            silent=not self._values,
        )

    def _all_values(self) -> dict[tuple[int | None, str], float]:
        values = {}
        for place, rows in self._seen.rows.items():
            if place[1] not in XID_SERIES:
                value = self._one_value([row for row in rows if not is_blank(row[1])])
                if value is not None:
                    values[place] = value
        return values

    def _one_value(self, rows: Rows) -> float | None:
        """What several rows of one series say of the GPU itself."""
        if not rows:
            return None
        fewest = min(pod_labels(labels) for labels, _ in rows)
        told = {value for labels, value in rows if pod_labels(labels) == fewest}
        if fewest and len(told) > 1:
            # Each pod's own part, of which none is the GPU's.
            self._dropped["pods_disagree"] += 1
            return None
        return max(told)

    def _facts(
        self, instance: int | None, fields: Sequence[DcgmField]
    ) -> dict[tuple[str, tuple[str, ...]], float]:
        facts: dict[tuple[str, tuple[str, ...]], float] = {}
        for each in fields:
            value = self._values.get((instance, each.series))
            if value is None or each.key in facts:
                continue
            if each.beside and (instance, each.beside) not in self._values:
                continue
            told = each.read(value)
            if math.isfinite(told):
                facts[each.key] = told
            else:
                self._dropped["value_not_finite"] += 1
        return facts

    def _mig_instance(self, instance: int, facts: Facts) -> MigInstance:
        profile = self._seen.profiles[instance]
        slices = _SLICES.search(profile)
        return MigInstance(
            # The exporter does not tell an instance's own UUID.
            uuid=f"{self._gpu}/{instance}",
            name=f"{self._seen.name} MIG {profile}".strip(),
            gpu_instance=instance,
            compute_instance=None,
            gpu_slices=int(slices[1]) if slices else None,
            facts=facts,
        )

    def _xids(self) -> dict[XidSource, Mapping[int, int]]:
        told = {}
        for source in XidSource:
            rows = [
                row
                for (_, series), rows in self._seen.rows.items()
                if series in source.value
                for row in rows
            ]
            if rows:
                told[source] = levels(source, rows, self._dropped)
        return told
