"""A source over an exposition that a test writes, and the result of its last read."""

from dataclasses import dataclass, field

from agent.catalog.dcgm_fields import DcgmField
from agent.records.gpu import GpuSample, GpuSamples, XidError
from agent.sources.dcgm.source import DcgmSource
from tests.sources.dcgm.exporter_pages import page_of, uuid_of
from tests.sources.engines.wire import EngineServer

PLENTY_S = 20.0


@dataclass
class ScriptedExporter:
    """Each poll is ten seconds after the last, by the source's clocks."""

    exporter: EngineServer
    extra_fields: tuple[DcgmField, ...] = ()
    timeout_s: float = PLENTY_S
    last: GpuSamples = field(default_factory=GpuSamples)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.source = DcgmSource(
            url=self.exporter.url,
            extra_fields=self.extra_fields,
            timeout_s=self.timeout_s,
            monotonic=lambda: self.now,
        )

    @property
    def samples(self) -> list[GpuSample]:
        """The samples of the last poll."""
        return list(self.last.samples)

    @property
    def xids(self) -> list[XidError]:
        """The Xids of the last poll."""
        return list(self.last.xids)

    @property
    def failures(self) -> list[str]:
        """The failures of the last poll."""
        return list(self.last.failures)

    def poll(self, *rows: str, page: bytes | None = None, status: int = 200) -> None:
        """Read once, after a new exposition where one is given."""
        if rows or page is not None:
            text = page_of(*rows) if page is None else page
            self.exporter.answers("/metrics", text, status=status)
        self.now += 10
        self.last = self.source.read(self.now)

    def of(self, index: int = 0) -> GpuSample:
        """The sample of one GPU from the last poll."""
        (found,) = [sample for sample in self.samples if sample.gpu == uuid_of(index)]
        return found

    def fact(self, name: str, *labels: str, index: int = 0) -> float | None:
        """A fact of one GPU from the last poll."""
        return self.of(index).fact(name, *labels)
