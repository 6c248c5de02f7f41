"""The source of GPU samples that reads dcgm-exporter or AMD's device-metrics-exporter."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from agent.catalog.dcgm_fields import DCGM_FIELDS, DcgmField
from agent.catalog.gpu_facts import (
    ENERGY,
    MEMORY_FREE,
    MEMORY_RESERVED,
    MEMORY_TOTAL,
    MEMORY_USED,
    UP,
)
from agent.catalog.gpu_problems import EXPORTER_STALE, GPU_MISSING, GPU_SILENT, NO_GPU
from agent.catalog.other_programs import other_program
from agent.catalog.reasons import INTERNAL, ExpositionFault
from agent.catalog.rocm_fields import ROCM_FIELDS
from agent.errors import ExpositionUnreadable, ReadFailed
from agent.records.gpu import Facts, GpuSample, GpuSamples, XidError
from agent.sources.dcgm.exporter_gpus import (
    ExporterGpu,
    ExporterGpus,
    XidCounts,
    read_gpus,
    wanted_series,
)
from agent.sources.engines.exposition import read_exposition
from agent.sources.engines.fetch import fetch, open_session

_LOG = logging.getLogger(__name__)

_PATH = "/metrics"

# An energy counter moves all the time, and exporters read theirs every 30 s unless set otherwise.
STALE_AFTER_S = 600.0


@dataclass(slots=True)
class _Result:
    """A read in the making: what was done before an error is returned all the same."""

    now: float
    samples: dict[str, GpuSample] = field(default_factory=dict)
    xids: list[XidError] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    problem: str | None = None


class DcgmSource:
    """Reads all GPUs of one exporter. `read` raises nothing; it must not run twice at once.

    The exporter reads its GPUs at an interval of its own, 30 s unless set otherwise, and does not
    publish when. A sample's values and Xids are up to that much older than its `at`, which is the
    time of the read. Reads in between return the same values again.
    """

    def __init__(
        self,
        *,
        url: str,
        extra_fields: Sequence[DcgmField] = (),
        timeout_s: float = 4.0,
        monotonic: Callable[[], float] = time.monotonic,
        ca: Path | None = None,
        pod: str | None = None,
    ) -> None:
        """The path of `url` may be left out. `extra_fields` come before the built-in ones.

        `ca` is a file of authorities that the exporter is trusted by. With `pod`, as
        `namespace/pod`, only GPUs of this pod are read.
        """
        self._pod = pod
        self._url = url if urlsplit(url).path.strip("/") else url.rstrip("/") + _PATH
        self._timeout_s = timeout_s
        self._fields = (*extra_fields, *DCGM_FIELDS, *ROCM_FIELDS)
        self._wanted = wanted_series(self._fields)
        self._session = open_session(ca)
        self._xids = XidCounts()
        self._known: dict[str, GpuSample] = {}
        self._monotonic = monotonic
        self._changed: dict[str, tuple[Facts, float]] = {}
        self._failing: str | None = None
        self._noted: str | None = None
        self._closed = False

    def read(self, now: float) -> GpuSamples:
        """Read every GPU once; `now` is Unix time."""
        if self._closed:
            return GpuSamples()
        result = _Result(now)
        try:
            self._add_gpus(self._scrape(), result)
        except ReadFailed as error:
            self._fail(error, result)
        except Exception:
            # An exposition can be broken in ways that no code here expects; reads must go on.
            _LOG.exception("the read of the GPU exporter failed inside the agent")
            unread = [uuid for uuid in self._known if uuid not in result.samples]
            self._miss(unread, INTERNAL, result)
            result.failures.append(INTERNAL)
            result.problem = "the read of the GPU exporter failed inside the agent: see its log"
        self._known |= result.samples
        return GpuSamples(
            samples=tuple(result.samples.values()),
            xids=tuple(result.xids),
            failures=tuple(result.failures),
            problem=result.problem,
        )

    def _scrape(self) -> ExporterGpus:
        text = fetch(self._session, self._url, timeout_s=self._timeout_s)
        exposition = read_exposition(text, self._wanted)
        if not exposition.series:
            program = other_program(text)
            looks = "" if program is None else f": this looks like {program}"
            raise ExpositionUnreadable(
                ExpositionFault.NO_KNOWN_SERIES,
                f"has no series of dcgm-exporter or AMD's device-metrics-exporter{looks}",
            )
        self._note(memory_note(self._fields, exposition.series))
        found = read_gpus(exposition, self._fields, self._known)
        return found if self._pod is None else replace(found, gpus=self._of_pod(found.gpus))

    def _of_pod(self, gpus: Iterable[ExporterGpu]) -> tuple[ExporterGpu, ...]:
        # A GPU stays the pod's when the pod has ended.
        return tuple(gpu for gpu in gpus if self._pod in gpu.pods or gpu.gpu in self._known)

    def _note(self, note: str | None) -> None:
        if note is not None and note != self._noted:
            _LOG.info("%s", note)
            self._noted = note

    def _add_gpus(self, found: ExporterGpus, result: _Result) -> None:
        if self._failing is not None:
            _LOG.info("the GPU exporter can be read again")
            self._failing = None
        missing = dict.fromkeys(self._known, GPU_MISSING)
        for gpu in found.gpus:
            self._add_xids(gpu, result)
            if gpu.silent:
                missing[gpu.gpu] = GPU_SILENT
            elif self._is_stale(gpu):
                missing[gpu.gpu] = EXPORTER_STALE
            else:
                missing.pop(gpu.gpu, None)
                result.samples[gpu.gpu] = self._sample(gpu, result.now)
        for uuid, problem in missing.items():
            self._miss([uuid], problem, result)
        none = set() if found.gpus else {NO_GPU}
        if none:
            of_pod = "" if self._pod is None else f" of the pod {self._pod}"
            result.problem = f"the GPU exporter lists no GPU{of_pod}"
        result.failures += sorted({*missing.values(), *found.dropped} | none)

    def _is_stale(self, gpu: ExporterGpu) -> bool:
        """Whether the facts of a GPU have not changed for long, though its energy must grow."""
        at = self._monotonic()
        facts, since = self._changed.get(gpu.gpu, ({}, at))
        if facts != gpu.facts:
            facts, since = gpu.facts, at
        self._changed[gpu.gpu] = facts, since
        return bool(facts.get((ENERGY.name, ()))) and at - since > STALE_AFTER_S

    def _add_xids(self, gpu: ExporterGpu, result: _Result) -> None:
        for xid, count in self._xids.read(gpu.gpu, gpu.xids, result.now).items():
            result.xids.append(XidError(gpu=gpu.gpu, xid=xid, at=result.now, count=count))

    def _sample(self, gpu: ExporterGpu, now: float) -> GpuSample:
        before = self._known.get(gpu.gpu)
        if before is not None and before.problem is not None:
            _LOG.info("GPU %s (index %d) is read again", gpu.gpu, gpu.index)
        return GpuSample(
            gpu=gpu.gpu,
            index=gpu.index,
            name=gpu.name,
            at=now,
            facts={(UP.name, ()): 1.0, **gpu.facts, **self._xids.facts(gpu.gpu)},
            mig_instances=gpu.instances,
            pods=gpu.pods,
        )

    def _fail(self, error: ReadFailed, result: _Result) -> None:
        reason = f"exporter_{error.reason}"
        result.problem = f"dcgm.url {error.public}"
        if reason != self._failing:
            _LOG.warning("no GPU is read from the exporter: %s", error)
            self._failing = reason
        self._miss(self._known, reason, result)
        result.failures.append(reason)

    def _miss(self, gpus: Iterable[str], reason: str, result: _Result) -> None:
        """Add a sample of each of these GPUs that was read before; none can be read now."""
        for uuid in gpus:
            before = self._known.get(uuid)
            if before is None:
                continue
            if before.problem != reason:
                _LOG.warning("GPU %s (index %d) cannot be read: %s", uuid, before.index, reason)
            result.samples[uuid] = before.unread(result.now, reason, self._xids.facts(uuid))

    def close(self) -> None:
        """Read nothing more, and close the connections."""
        self._closed = True
        self._session.close()


def memory_note(fields: Iterable[DcgmField], series: Collection[str]) -> str | None:
    """How the total memory is known if the exporter does not export it, else None."""
    given = {each.fact for each in fields if each.series in series}
    if MEMORY_TOTAL.name in given or not {MEMORY_USED.name, MEMORY_FREE.name} <= given:
        return None
    if MEMORY_RESERVED.name in given:
        return "dcgm-exporter exports no total memory: it is used + free + reserved"
    return (
        "dcgm-exporter exports no total and no reserved memory: the total is used + free, and old "
        "drivers count in the used memory what they reserve; export DCGM_FI_DEV_FB_RESERVED"
    )
