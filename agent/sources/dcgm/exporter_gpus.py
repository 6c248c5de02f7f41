"""The GPUs and Xid errors of one exposition of a GPU exporter, in our facts."""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from agent.catalog import gpu_facts as f
from agent.catalog.dcgm_fields import (
    DIVIDED_FACTS,
    XID_LAST,
    XID_TOTAL,
    XID_WINDOW,
    DcgmField,
    is_blank,
)
from agent.catalog.gpu_problems import COUNTED_XIDS
from agent.records.gpu import FactKey, Facts, MigInstance
from agent.sources.engines.exposition import Exposition

XidRows = Iterable[tuple[Mapping[str, str], float]]
# The value by Xid in one kind of series.
Levels = Mapping[int, int]

# Real ones have three digits; a broken exposition must not make a series of every number.
_LARGEST_XID = 9999


class XidSeries(Enum):
    """The kinds of series about Xids, by their names."""

    LAST = XID_LAST
    WINDOW = (XID_WINDOW,)
    TOTAL = (XID_TOTAL,)


XidLevels = Mapping[XidSeries, Levels]

XID_SERIES = frozenset(name for kind in XidSeries for name in kind.value)


def levels(kind: XidSeries, rows: XidRows, dropped: Counter[str]) -> Levels:
    """The value by Xid in the rows of one GPU; rows without a usable one count in `dropped`.

    Rows for several pods or instances each repeat the GPU's value: the highest one counts.
    """
    found: dict[int, int] = {}
    for labels, value in rows:
        if is_blank(value):
            continue
        try:
            xid, level = _READ[kind](labels, value)
        except ValueError:
            dropped["xid_malformed"] += 1
            continue
        if xid:
            found[xid] = max(level, found.get(xid, 0))
    return found


def _last(_labels: Mapping[str, str], value: float) -> tuple[int, int]:
    return _checked(value), 1


def _counted(labels: Mapping[str, str], value: float) -> tuple[int, int]:
    # A window without an Xid is a zero without the label.
    xid = _checked(float(labels.get("xid") or 0))
    if value < 0:
        raise ValueError
    return xid, int(value)


def _checked(xid: float) -> int:
    if not (0 <= xid <= _LARGEST_XID and xid == int(xid)):
        raise ValueError
    return int(xid)


_READ: Mapping[XidSeries, Callable[[Mapping[str, str], float], tuple[int, int]]] = {
    XidSeries.LAST: _last,
    XidSeries.WINDOW: _counted,
    XidSeries.TOTAL: _counted,
}


@dataclass(slots=True)
class _GpuXids:
    levels: dict[XidSeries, Levels]
    counted: dict[XidSeries, Counter[int]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)

    def take(self, kind: XidSeries, now: Levels) -> None:
        before = self.levels.get(kind, {})
        counted = self.counted.setdefault(kind, Counter())
        for xid, level in now.items():
            counted[xid] += _growth(kind, before.get(xid, 0), level)
        # A total keeps its last value, so that a row that was missing once is not an increase.
        self.levels[kind] = {**before, **now} if kind is XidSeries.TOTAL else now

    def new(self) -> dict[int, int]:
        most: Counter[int] = Counter()
        for counted in self.counted.values():
            most |= counted
        return {xid: count for xid, count in most.items() if count > self.counts.get(xid, 0)}


def _growth(kind: XidSeries, before: int, now: int) -> int:
    """How many errors are new at least, if a series went from one value to another."""
    if now >= before:
        return now - before
    # A total falls when the exporter restarts; a window falls as it moves on.
    return now if kind is XidSeries.TOTAL else 0


class XidCounts:
    """How often each GPU had each Xid since its first exposition. It outlives the exporter.

    The first exposition is where counting starts. A series that is absent keeps its last value:
    after an interval without it, only the difference is new. All series report the same errors,
    at different times, so the highest count of any series counts.
    """

    def __init__(self) -> None:
        self._gpus: dict[str, _GpuXids] = {}

    def read(self, gpu: str, xids: XidLevels, at: float) -> Mapping[int, int]:
        """Take in an exposition; returns the Xids that are new in it, with their count in all."""
        state = self._gpus.get(gpu)
        if state is None:
            state = self._gpus[gpu] = _GpuXids(dict(xids))
        for kind, now in xids.items():
            state.take(kind, now)
        new = state.new()
        state.counts |= new
        if xids or state.facts:
            state.facts = _facts(state, new, at)
        return new

    def facts(self, gpu: str) -> Facts:
        """The counts as facts; none for a GPU without any series about Xids."""
        state = self._gpus.get(gpu)
        return {} if state is None else state.facts


def _facts(state: _GpuXids, new: Iterable[int], at: float) -> Facts:
    counts = {**dict.fromkeys(COUNTED_XIDS, 0), **state.counts}
    return {
        **state.facts,
        **{(f.XID_ERRORS.name, (str(xid),)): float(count) for xid, count in counts.items()},
        **{(f.XID_LAST_SEEN.name, (str(xid),)): at for xid in new},
    }


Rows = list[tuple[Mapping[str, str], float]]

# Far more than a host has, for expositions of several hosts; a broken one must not fill the memory.
MOST_GPUS = 1024
UNKNOWN_INDEX = -1
# As the database stores it; NVIDIA's own are shorter (NVML_DEVICE_NAME_V2_BUFFER_SIZE is 96).
LONGEST_NAME = 100

_UUID_LABELS = ("UUID", "uuid", "gpu_uuid")
_NAME_LABELS = ("modelName", "model_name", "card_series", "card_model")
_POD_LABELS = ("pod", "pod_name", "exported_pod", "pod_uid", "vgpu")
# Namespace and name of the pod that has the GPU: the exporter's usual labels, those of its option
# --use-old-namespace, and those of a Prometheus that passes them on.
_PODS = (
    ("namespace", "pod"),
    ("pod_namespace", "pod_name"),
    ("exported_namespace", "exported_pod"),
)
# Two rows that have these in common are of one pod, as of the parts of a GPU.
_SHARE_LABELS = (*_POD_LABELS, "namespace", "container")
_HEX_UUID = re.compile(
    r"(?:GPU-)?([0-9a-f]{8})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{12})",
    re.IGNORECASE | re.ASCII,
)
# NVML_DEVICE_UUID_V2_BUFFER_SIZE (nvml.h).
_LONGEST_UUID = 96
# AMD's label of a GPU that is not partitioned, or of the part that has the board's sensors.
_FIRST_PARTITION = ("", "0", "NA")
_INSTINCT = re.compile(r"Instinct (MI[0-9]+[A-Z]*)")
_INDEX = re.compile(r"(?:nvidia)?([0-9]{1,6})", re.ASCII)
# "3g.40gb" and "1c.3g.40gb" have three of the GPU's slices.
_SLICES = re.compile(r"(?:^|\.)([0-9]{1,2})g\.")


class RowUnusable(Exception):
    """A row that concerns no GPU as a whole; `reason` is a short word for counting."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Entity:
    """A GPU by its UUID, or the MIG instance of it with this number."""

    gpu: str
    instance: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterGpu:
    """One GPU of an exposition. A `silent` GPU has no value there, except Xids."""

    gpu: str
    index: int
    name: str
    facts: Facts
    instances: tuple[MigInstance, ...]
    xids: XidLevels
    silent: bool
    pods: frozenset[str]


@dataclass(frozen=True, slots=True)
class ExporterGpus:
    """All GPUs of an exposition, and how many lines, rows or values were dropped, by reason."""

    gpus: tuple[ExporterGpu, ...]
    dropped: Mapping[str, int]


@dataclass(slots=True)
class _GpuRows:
    index: int = UNKNOWN_INDEX
    name: str = ""
    profiles: dict[int, str] = field(default_factory=dict)
    pods: set[str] = field(default_factory=set)
    rows: dict[tuple[int | None, str], Rows] = field(default_factory=dict)

    def add(self, entity: Entity, series: str, labels: Mapping[str, str], value: float) -> None:
        self.name = self.name or name_of(labels)
        if self.index == UNKNOWN_INDEX:
            self.index = index_of(labels)
        if (pod := pod_of(labels)) is not None:
            self.pods.add(pod)
        if entity.instance is not None:
            self.profiles.setdefault(entity.instance, labels.get("GPU_I_PROFILE", ""))
        self.rows.setdefault((entity.instance, series), []).append((labels, value))


def wanted_series(fields: Iterable[DcgmField]) -> frozenset[str]:
    """The names of the series that `read_gpus` uses."""
    used = {name for each in fields for name in (each.series, *each.beside)}
    return XID_SERIES | used


def read_gpus(
    exposition: Exposition, fields: Sequence[DcgmField], known: Collection[str] = ()
) -> ExporterGpus:
    """Each GPU that a row concerns, in the order of the exposition.

    Of too many GPUs those in `known` come first. Rows of one GPU for several pods count once.
    """
    dropped = Counter(exposition.dropped)
    rows = _rows_by_gpu(exposition, known, dropped)
    by_label = {each.series for each in fields if each.only is not None}
    gpus = tuple(
        _Translation(gpu, each, dropped, by_label).translated(fields) for gpu, each in rows.items()
    )
    return ExporterGpus(gpus, dict(dropped))


def _rows_by_gpu(
    exposition: Exposition, known: Collection[str], dropped: Counter[str]
) -> dict[str, _GpuRows]:
    rows: dict[str, _GpuRows] = {}
    gpus_left = MOST_GPUS - len(known)
    for series, samples in exposition.series.items():
        for sample in samples:
            try:
                entity = entity_of(sample.labels)
            except RowUnusable as row:
                dropped[row.reason] += 1
                continue
            if entity.gpu not in rows and entity.gpu not in known:
                if gpus_left <= 0:
                    dropped["too_many_gpus"] += 1
                    continue
                gpus_left -= 1
            rows.setdefault(entity.gpu, _GpuRows()).add(entity, series, sample.labels, sample.value)
    return rows


class _Translation:
    def __init__(
        self, gpu: str, rows: _GpuRows, dropped: Counter[str], by_label: Collection[str]
    ) -> None:
        """`by_label` are the series of which a label says what a row measures."""
        self._gpu = gpu
        self._rows = rows
        self._dropped = dropped
        self._by_label = by_label
        self._values = self._all_values()

    def translated(self, fields: Sequence[DcgmField]) -> ExporterGpu:
        facts = self._facts(None, fields)
        instances = []
        for instance in sorted(self._rows.profiles):
            own = self._facts(instance, fields)
            divided = {key: value for key, value in own.items() if key[0] in DIVIDED_FACTS}
            # A GPU without rows of its own gets the facts from the rows of its instances.
            for key in own.keys() - divided.keys():
                facts.setdefault(key, own[key])
            instances.append(self._mig_instance(instance, divided))
        return ExporterGpu(
            gpu=self._gpu,
            index=self._rows.index,
            name=self._rows.name,
            facts=facts,
            instances=tuple(instances),
            xids=self._xids(),
            silent=not self._values,
            pods=frozenset(self._rows.pods),
        )

    def _all_values(self) -> dict[tuple[int | None, str], float]:
        values = {}
        for key, rows in self._rows.rows.items():
            known = [row for row in rows if not is_blank(row[1])]
            if key[1] in XID_SERIES or not known:
                continue
            # Rows that differ in what they measure do not disagree.
            value = known[0][1] if key[1] in self._by_label else self._one_value(known)
            if value is not None:
                values[key] = value
        return values

    def _one_value(self, rows: Rows) -> float | None:
        """The GPU's own value in several rows of one series."""
        if not rows:
            return None
        fewest = min(pod_labels(labels) for labels, _ in rows)
        own = [row for row in rows if pod_labels(row[0]) == fewest]
        shares = {tuple(map(labels.get, _SHARE_LABELS)) for labels, _ in own}
        values = {value for _, value in own}
        if fewest and len(shares) > 1 and len(values) > 1:
            # Each row has a pod's share, none the value of the GPU.
            self._dropped["pods_disagree"] += 1
            return None
        return max(values)

    def _value(self, instance: int | None, each: DcgmField) -> float | None:
        if each.only is None:
            return self._values.get((instance, each.series))
        label, values = each.only
        rows = self._rows.rows.get((instance, each.series), ())
        return self._one_value(
            [row for row in rows if row[0].get(label) in values and not is_blank(row[1])]
        )

    def _facts(self, instance: int | None, fields: Sequence[DcgmField]) -> dict[FactKey, float]:
        facts: dict[FactKey, float] = {}
        for each in fields:
            value = self._value(instance, each)
            if value is None or each.key in facts or (each.zero_means_off and not value):
                continue
            if each.beside and not any((instance, name) in self._values for name in each.beside):
                continue
            converted = each.read(value)
            if math.isfinite(converted):
                facts[each.key] = converted
            else:
                self._dropped["value_not_finite"] += 1
        return _with_total(facts)

    def _mig_instance(self, instance: int, facts: Facts) -> MigInstance:
        profile = self._rows.profiles[instance]
        slices = _SLICES.search(profile)
        return MigInstance(
            # The exporter does not publish an instance's own UUID.
            uuid=f"{self._gpu}/{instance}",
            name=f"{self._rows.name} MIG {profile}".strip(),
            gpu_instance=instance,
            compute_instance=None,
            gpu_slices=int(slices[1]) if slices else None,
            facts=facts,
        )

    def _xids(self) -> dict[XidSeries, Mapping[int, int]]:
        found = {}
        for kind in XidSeries:
            rows = [
                row
                for (_, series), rows in self._rows.rows.items()
                if series in kind.value
                for row in rows
            ]
            if rows:
                found[kind] = levels(kind, rows, self._dropped)
        return found


def _with_total(facts: dict[FactKey, float]) -> dict[FactKey, float]:
    """The facts with the total memory, which an exporter does not export by default."""
    parts = [facts.get((fact.name, ())) for fact in (f.MEMORY_USED, f.MEMORY_FREE)]
    known = [part for part in parts if part is not None]
    if len(known) == len(parts):
        reserved = facts.get((f.MEMORY_RESERVED.name, ()), 0.0)
        facts.setdefault((f.MEMORY_TOTAL.name, ()), sum(known) + reserved)
    return facts


def entity_of(labels: Mapping[str, str]) -> Entity:
    """The GPU or instance of a row. Raises RowUnusable for `uuid_*`, `link_row` and
    `instance_malformed`.
    """
    if labels.get("nvlink"):
        raise RowUnusable("link_row")
    return Entity(_gpu(_first(labels, _UUID_LABELS) or _serial(labels)), _instance(labels))


def _serial(labels: Mapping[str, str]) -> str:
    """The name of a GPU of AMD's exporter, which has UUIDs only if its settings list the label."""
    serial, partition = labels.get("serial_number", ""), labels.get("gpu_partition_id", "")
    return f"{serial}/{partition}" if serial and partition not in _FIRST_PARTITION else serial


def _gpu(uuid: str) -> str:
    uuid = uuid.strip()
    if not uuid:
        raise RowUnusable("uuid_missing")
    if len(uuid) > _LONGEST_UUID:
        raise RowUnusable("uuid_malformed")
    parts = _HEX_UUID.fullmatch(uuid)
    # NVML's spelling, so that both sources name a GPU alike.
    return f"GPU-{'-'.join(parts.groups()).lower()}" if parts else uuid


def _instance(labels: Mapping[str, str]) -> int | None:
    number = labels.get("GPU_I_ID", "")
    if not number and not labels.get("GPU_I_PROFILE"):
        return None
    if not (number.isascii() and number.isdigit() and len(number) <= 4):
        raise RowUnusable("instance_malformed")
    return int(number)


def name_of(labels: Mapping[str, str]) -> str:
    """The model of the GPU, cut if it is too long, empty if the row has none."""
    name = _first(labels, _NAME_LABELS)
    # AMD's own names differ with the driver, as "Aqua Vanjaram [Instinct MI300X VF]".
    instinct = _INSTINCT.search(name)
    return f"AMD Instinct {instinct[1]}" if instinct else name[:LONGEST_NAME]


def index_of(labels: Mapping[str, str]) -> int:
    """The index of the GPU on its own host, UNKNOWN_INDEX if the row has none."""
    for label in ("gpu", "device", "gpu_id"):
        found = _INDEX.fullmatch(labels.get(label, ""))
        if found:
            return int(found[1])
    return UNKNOWN_INDEX


def pod_of(labels: Mapping[str, str]) -> str | None:
    """The pod of a row as `namespace/pod`; None if the row is of no pod."""
    for namespace, pod in _PODS:
        if labels.get(namespace) and labels.get(pod):
            return f"{labels[namespace]}/{labels[pod]}"
    return None


def pod_labels(labels: Mapping[str, str]) -> int:
    """How many labels tie the row to a pod: if pods share a GPU, it may be a pod's share."""
    return sum(1 for label in _POD_LABELS if labels.get(label))


def _first(labels: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((value for name in names if (value := labels.get(name))), "")
