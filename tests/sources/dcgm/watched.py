"""A watch over a page that a test writes, and all that it told its sinks."""

from dataclasses import dataclass, field

from agent.catalog.dcgm_fields import DcgmField
from agent.records.gpu import GpuSample, XidSeen
from agent.sources.dcgm.watch import DcgmSinks, DcgmWatch
from tests.sources.dcgm.exporter_pages import page_of, uuid_of
from tests.sources.engines.wire import EngineServer

PLENTY_S = 20.0


@dataclass
class Watched:
    """Each poll is ten seconds after the last, for the watch's clocks."""

    exporter: EngineServer
    extra_fields: tuple[DcgmField, ...] = ()
    timeout_s: float = PLENTY_S
    samples: list[GpuSample] = field(default_factory=list)
    xids: list[XidSeen] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.watch = DcgmWatch(
            url=self.exporter.url,
            sinks=DcgmSinks(self.samples.append, self.xids.append, self.failures.append),
            extra_fields=self.extra_fields,
            timeout_s=self.timeout_s,
            monotonic=lambda: self.now,
        )

    def poll(self, *rows: str, page: bytes | None = None, status: int = 200) -> None:
        """Poll once, a new page where one is given; then only what this poll told is there."""
        if rows or page is not None:
            text = page_of(*rows) if page is None else page
            self.exporter.answers("/metrics", text, status=status)
        for told in (self.samples, self.xids, self.failures):
            told.clear()
        self.now += 10
        self.watch.poll(self.now)

    def of(self, index: int = 0) -> GpuSample:
        """The sample of one GPU from the last poll."""
        (found,) = [sample for sample in self.samples if sample.gpu == uuid_of(index)]
        return found

    def fact(self, name: str, *labels: str, index: int = 0) -> float | None:
        """A fact of one GPU from the last poll."""
        return self.of(index).fact(name, *labels)
