"""Result files of AIPerf: `profile_export.jsonl` with single requests, else the JSON of figures."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agent.records.request import RequestRecord, Status
from agent.sources.result_files.benched import (
    PERCENTILES,
    BenchedFigures,
    BenchedRun,
    benched_request,
    known,
    texts,
)

TOOL = "AIPerf"
# The file of figures beside that of the requests: only there is the configured load.
FIGURES_FILE = "profile_export_aiperf.json"
RECORDS_FILE = "profile_export.jsonl"

_LATENCIES = {
    "TTFT": "time_to_first_token",
    "TPOT": "inter_token_latency",
    "end to end": "request_latency",
}
_INPUT, _OUTPUT = "input_sequence_length", "output_sequence_length"
_LENGTHS = {"input tokens": _INPUT, "output tokens": _OUTPUT}
_RATES = {"goodput": "goodput", "output tokens/s": "output_token_throughput"}
_NS = 1e9


class _AiperfMetadata(msgspec.Struct):
    """What a line says of its request."""

    request_start_ns: int
    request_end_ns: int
    benchmark_phase: str
    was_cancelled: bool = False


class _AiperfRecord(msgspec.Struct):
    """One line of the file of requests."""

    metadata: _AiperfMetadata
    metrics: dict[str, dict[str, Any]]
    error: Any = None

    @property
    def status(self) -> Status:
        if self.metadata.was_cancelled:
            return Status.CANCELLED
        return Status.OK if self.error is None else Status.ERROR

    def value(self, metric: str) -> float | None:
        """A metric's value; None if the line has none."""
        found = self.metrics.get(metric, {}).get("value")
        return found if isinstance(found, (int, float)) else None


class _AiperfPhase(msgspec.Struct):
    """The load of one phase of a run."""

    kind: str | None = None
    type: str | None = None
    concurrency: float | None = None
    rate: float | None = None


def is_aiperf_record(content: Mapping[str, Any]) -> bool:
    """Whether a line looks like one of AIPerf's."""
    return "metrics" in content and "request_start_ns" in (content.get("metadata") or ())


def is_aiperf(content: Mapping[str, Any]) -> bool:
    """Whether a file looks like AIPerf's figures."""
    return "aiperf_version" in content


def read_aiperf_records(
    lines: Sequence[bytes], figures: Mapping[str, Any] | None
) -> BenchedRun | None:
    """The measured requests of a file; `figures` is the content of the file beside it.

    None if no request was measured. Raises msgspec.ValidationError.
    """
    found = [msgspec.json.decode(line, type=_AiperfRecord) for line in lines]
    measured = [each for each in found if each.metadata.benchmark_phase == "profiling"]
    load = {} if figures is None else _load(figures)
    records = tuple(_record(number, each) for number, each in enumerate(measured))
    return BenchedRun(tool=TOOL, records=records, load=load) if records else None


def _record(number: int, record: _AiperfRecord) -> RequestRecord:
    times = record.metadata.request_start_ns / _NS, record.metadata.request_end_ns / _NS
    ttft_s, tpot_s, e2e_s = (_seconds(record.value(metric)) for metric in _LATENCIES.values())
    return benched_request(
        number,
        record.status,
        times,
        latencies_s=(ttft_s, tpot_s, e2e_s),
        tokens=(_whole(record.value(_INPUT)), _whole(record.value(_OUTPUT))),
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def read_aiperf(content: Mapping[str, Any]) -> BenchedFigures:
    """The figures of a file."""

    def figure(metric: str, statistic: str) -> float | None:
        found = content.get(metric, {}).get(statistic)
        return float(found) if isinstance(found, (int, float)) else None

    percentiles = {
        (name, percentile): figure(metric, percentile)
        for name, metric in {**_LATENCIES, **_LENGTHS}.items()
        for percentile in PERCENTILES
    }
    errors = figure("request_error_rate", "avg")
    return BenchedFigures(
        tool=TOOL,
        requests=round(figure("request_count", "avg") or 0),
        length_s=figure("benchmark_duration", "avg") or 0.0,
        figures=known(
            {
                **{
                    f"{name} {percentile}": _seconds(value) if name in _LATENCIES else value
                    for (name, percentile), value in percentiles.items()
                },
                **{f"{name}, mean": figure(metric, "avg") for name, metric in _LENGTHS.items()},
                **{name: figure(metric, "avg") for name, metric in _RATES.items()},
                "requests/s": figure("request_throughput", "avg"),
                "error ratio": None if errors is None else errors / 100,
            }
        ),
        load=_load(content),
    )


def _load(content: Mapping[str, Any]) -> dict[str, str]:
    phases = [
        msgspec.convert(each, _AiperfPhase)
        for each in content.get("input_config", {}).get("phases", [])
    ]
    measured = [phase for phase in phases if phase.kind == "profiling"]
    if len(measured) != 1:
        return {}
    (phase,) = measured
    return texts(
        {
            "arrivals": phase.type,
            "request rate": phase.rate or "no limit",
            "concurrency": phase.concurrency or "no limit",
        }
    )
