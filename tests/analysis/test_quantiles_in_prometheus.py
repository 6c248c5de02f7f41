"""Prometheus reads our bins as a native histogram, with the same buckets and percentiles."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.proto import serialize_length_prefixed

from agent.analysis.quantiles import (
    BINS_PER_DOUBLING,
    RELATIVE_ERROR,
    ExponentialHistogram,
    bins_of,
    exponential_from,
)
from tests.real_parts.prometheus import Prometheus, scrape_of
from tests.real_parts.waiting import eventually

NAME = "ttft_seconds"
SCRAPED_WITHIN_S = 60.0
DELIMITED = (
    "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
)

# The part of prometheus/client_model 0.3 (io/prometheus/client/metrics.proto) that is needed.
_FIELD = FieldDescriptorProto
_MESSAGES: dict[str, dict[str, tuple[int, Any, bool]]] = {
    "BucketSpan": {
        "offset": (1, _FIELD.TYPE_SINT32, False),
        "length": (2, _FIELD.TYPE_UINT32, False),
    },
    "Histogram": {
        "sample_count": (1, _FIELD.TYPE_UINT64, False),
        "sample_sum": (2, _FIELD.TYPE_DOUBLE, False),
        "schema": (5, _FIELD.TYPE_SINT32, False),
        "zero_threshold": (6, _FIELD.TYPE_DOUBLE, False),
        "zero_count": (7, _FIELD.TYPE_UINT64, False),
        "positive_span": (12, "BucketSpan", True),
        "positive_delta": (13, _FIELD.TYPE_SINT64, True),
    },
    "Metric": {"histogram": (7, "Histogram", False)},
    "MetricFamily": {
        "name": (1, _FIELD.TYPE_STRING, False),
        "type": (3, _FIELD.TYPE_INT32, False),
        "metric": (4, "Metric", True),
    },
}
_HISTOGRAM_TYPE = 4


def _metric_family() -> Any:
    file = FileDescriptorProto(name="metrics.proto", package="io", syntax="proto2")
    for message, fields in _MESSAGES.items():
        message_type = file.message_type.add(name=message)
        for name, (number, kind, many) in fields.items():
            field = message_type.field.add(name=name, number=number)
            field.label = _FIELD.LABEL_REPEATED if many else _FIELD.LABEL_OPTIONAL
            if isinstance(kind, str):
                field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".io.{kind}"
            else:
                field.type = kind
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("io.MetricFamily"))


def exposition_of(histogram: ExponentialHistogram, total_s: float) -> bytes:
    """An exposition with one native histogram.

    Prometheus numbers a bucket by its upper bound, OpenTelemetry by its lower one.
    """
    counts = list(histogram.bucket_counts)
    family = _metric_family()(name=NAME, type=_HISTOGRAM_TYPE)
    native = family.metric.add().histogram
    native.sample_count, native.sample_sum = histogram.count, total_s
    native.schema, native.zero_count = histogram.scale, histogram.zero_count
    native.zero_threshold = histogram.zero_threshold
    native.positive_span.add(offset=histogram.offset + 1, length=len(counts))
    native.positive_delta.extend(after - before for before, after in pairwise([0, *counts]))
    exposition = BytesIO()
    serialize_length_prefixed(family, exposition)
    return exposition.getvalue()


@contextmanager
def served(exposition: bytes) -> Iterator[str]:
    """The URL of a server of this exposition."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", DELIMITED)
            self.send_header("Content-Length", str(len(exposition)))
            self.end_headers()
            self.wfile.write(exposition)

        def log_message(self, *_args: object) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_prometheus_has_the_same_buckets_and_percentiles(tmp_path: Path) -> None:
    seeded = Random(5)
    values_s = [0.0, 0.0, *(seeded.lognormvariate(-1.6, 1.0) for _ in range(20_000))]
    bins = bins_of(values_s)
    histogram = exponential_from(bins)
    with (
        served(exposition_of(histogram, sum(values_s))) as url,
        Prometheus(tmp_path, scrape_of("agent", url), "native-histograms") as prometheus,
    ):
        (found,) = eventually(
            lambda: prometheus.query(NAME), within_s=SCRAPED_WITHIN_S, what="the histogram"
        )
        p99s = prometheus.query(f"histogram_quantile(0.99, {NAME})")
    _, native = found["histogram"]
    assert int(native["count"]) == 20_002
    assert float(native["sum"]) == pytest.approx(sum(values_s))
    zero, *buckets = native["buckets"]
    assert int(zero[3]) == 2
    low = min(index for index in bins if bins[index] and index != min(bins))
    expected = {index: count for index, count in bins.items() if index >= low}
    uppers = [2 ** (index / BINS_PER_DOUBLING) for index in sorted(expected)]
    assert [float(bucket[2]) for bucket in buckets] == pytest.approx(uppers, rel=1e-9)
    assert [int(bucket[3]) for bucket in buckets] == [expected[index] for index in sorted(expected)]
    exact = sorted(values_s)[int(0.99 * len(values_s))]
    assert float(p99s[0]["value"][1]) == pytest.approx(exact, rel=2.1 * RELATIVE_ERROR)
