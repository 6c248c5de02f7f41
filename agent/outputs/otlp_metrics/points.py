"""The points of OTLP metrics, one for each series."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    DataPointFlags,
    Exemplar,
    ExponentialHistogramDataPoint,
    HistogramDataPoint,
    NumberDataPoint,
)
from prometheus_client.samples import Exemplar as PrometheusExemplar

from agent.analysis.exponential import exponential_from
from agent.analysis.quantiles import Bins
from agent.outputs.otlp_metrics.series import Buckets, Labels

_NO_VALUE = DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
_HEX_DIGITS_OF_TRACE = 32


@dataclass(frozen=True, slots=True)
class Times:
    """When a point was read and when its counting began, in Unix nanoseconds; 0 is unknown."""

    read_ns: int
    started_ns: int = 0


def nanoseconds(unix_s: float) -> int:
    """Unix time in nanoseconds."""
    return int(unix_s * 1e9)


def attributes(labels: Iterable[tuple[str, str]]) -> list[KeyValue]:
    """Labels as attributes."""
    return [KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in labels]


def number_point(labels: Labels, times: Times, value: float) -> NumberDataPoint:
    """The point of a counter or a gauge."""
    return NumberDataPoint(
        attributes=attributes(labels),
        start_time_unix_nano=times.started_ns,
        time_unix_nano=times.read_ns,
        as_double=value,
    )


def explicit_point(labels: Labels, times: Times, buckets: Buckets) -> HistogramDataPoint:
    """The point of a histogram with explicit bounds."""
    return HistogramDataPoint(
        attributes=attributes(labels),
        start_time_unix_nano=times.started_ns,
        time_unix_nano=times.read_ns,
        count=sum(buckets.counts),
        sum=buckets.sum,
        bucket_counts=buckets.counts,
        explicit_bounds=buckets.bounds,
        exemplars=_exemplars(buckets.exemplars),
    )


def exponential_point(
    labels: Labels, times: Times, buckets: Buckets, bins: Bins, max_buckets: int
) -> ExponentialHistogramDataPoint:
    """The point of an exponential histogram of bins; `buckets` give its sum and its exemplars."""
    histogram = exponential_from(bins, max_buckets)
    return ExponentialHistogramDataPoint(
        attributes=attributes(labels),
        start_time_unix_nano=times.started_ns,
        time_unix_nano=times.read_ns,
        count=histogram.count,
        sum=buckets.sum,
        scale=histogram.scale,
        zero_count=histogram.zero_count,
        zero_threshold=histogram.zero_threshold,
        positive=ExponentialHistogramDataPoint.Buckets(
            offset=histogram.offset, bucket_counts=histogram.bucket_counts
        ),
        exemplars=_exemplars(buckets.exemplars),
    )


def ended_point(labels: Labels, read_ns: int) -> NumberDataPoint:
    """The point that ends a series of numbers: it has no value from this time on."""
    return NumberDataPoint(attributes=attributes(labels), time_unix_nano=read_ns, flags=_NO_VALUE)


def ended_histogram(labels: Labels, read_ns: int) -> HistogramDataPoint:
    """The point that ends a histogram with explicit bounds."""
    return HistogramDataPoint(
        attributes=attributes(labels), time_unix_nano=read_ns, flags=_NO_VALUE
    )


def ended_exponential(labels: Labels, read_ns: int) -> ExponentialHistogramDataPoint:
    """The point that ends an exponential histogram."""
    return ExponentialHistogramDataPoint(
        attributes=attributes(labels), time_unix_nano=read_ns, flags=_NO_VALUE
    )


def _exemplars(exemplars: Iterable[PrometheusExemplar]) -> Iterator[Exemplar]:
    for exemplar in exemplars:
        trace_id = exemplar.labels.get("trace_id", "")
        if len(trace_id) == _HEX_DIGITS_OF_TRACE and exemplar.timestamp is not None:
            yield Exemplar(
                trace_id=bytes.fromhex(trace_id),
                as_double=exemplar.value,
                time_unix_nano=nanoseconds(float(exemplar.timestamp)),
            )
