"""The settings of the sources that read GPUs."""

from typing import Self

from pydantic import Field, model_validator

from agent.catalog.dcgm_fields import DcgmField
from agent.errors import SettingsInvalid
from agent.settings.section import Section
from agent.settings.values import Duration, HttpUrl, Number


class NvmlSettings(Section):
    """Reading GPUs through NVML, on a machine that has GPUs."""

    enabled: bool = True
    """Whether GPUs are read through NVML."""
    poll_interval: Duration = Field(default="1s")  # type: ignore[assignment]
    """Time between two polls."""


class DcgmFieldSettings(Section):
    """A series of dcgm-exporter that gives one of our facts, beside the built-in ones."""

    series: str = Field(min_length=1, max_length=200)
    """The name of the series."""
    fact: str
    """The metric that it gives, as in `gpu_clock_hertz`."""
    labels: tuple[str, ...] = ()
    """The values of the metric's own labels."""
    scale: Number = Field(default=1.0, gt=0)
    """The metric is the value of the series times this."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        try:
            self.field()
        except SettingsInvalid as error:
            raise ValueError("; ".join(error.problems)) from error
        return self

    def field(self) -> DcgmField:
        """The row for the table of series."""
        return DcgmField(series=self.series, fact=self.fact, labels=self.labels, scale=self.scale)


class DcgmSettings(Section):
    """Reading GPUs from a dcgm-exporter instead of NVML."""

    url: HttpUrl | None = None
    """Where the exporter is scraped, as in `http://node:9400/metrics`; null: NVML is read."""
    poll_interval: Duration = Field(default="10s")  # type: ignore[assignment]
    """Time between two polls."""
    fields: tuple[DcgmFieldSettings, ...] = ()
    """Series that give our metrics, beside the built-in ones."""
