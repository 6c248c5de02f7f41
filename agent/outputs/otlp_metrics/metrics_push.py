"""Pushes metrics to an OTLP endpoint, from a queue of its own that the agent never waits for."""

import gzip
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)

from agent.outputs.otlp_destinations import PROTOBUF, HttpDestination
from agent.outputs.otlp_forwarder import ForwardCounter, Forwarder
from agent.outputs.otlp_metrics.export_requests import ExportRequests, MetricsSnapshot
from agent.settings.push_settings import OtlpMetricsSettings

_LOG = logging.getLogger(__name__)

PATH = "/v1/metrics"
# Five minutes of exports. Counters catch up by themselves, only gauges lose values.
MAX_WAITING = 20
# This level saves most of what gzip can save, in a fifth of the time of its default.
_GZIP_LEVEL = 1


class PushCounter(ForwardCounter, Protocol):
    """Counts exports, and the points in them that the endpoint refused."""

    def points_rejected(self, points: int) -> None:
        """Count points that the endpoint left out of an export that it accepted."""


@dataclass(frozen=True, slots=True)
class Export:
    """The body of an export."""

    content: bytes
    gzipped: bool
    content_type: str = PROTOBUF


class MetricsPush:
    """Queues an export of all metrics at each call; a thread of its own sends them."""

    def __init__(
        self,
        settings: OtlpMetricsSettings,
        endpoint: str,
        read: Callable[[float], MetricsSnapshot],
        requests: ExportRequests,
        counter: PushCounter,
        *,
        proxy: str | None = None,
        ca: Path | None = None,
    ) -> None:
        """`read` returns all metrics; its argument is the Unix time now."""
        self._lock = threading.Lock()
        self._read = read
        self._requests = requests
        self._gzipped = settings.compression == "gzip"
        self._counter = counter
        to = HttpDestination(
            endpoint,
            path=PATH,
            headers={name: value.get_secret_value() for name, value in settings.headers.items()},
            timeout_s=settings.timeout,
            proxy=proxy,
            ca=ca,
            on_accepted=self._count_rejected,
        )
        self.forwarder = Forwarder(to, counter, name="metrics-push", max_bodies=MAX_WAITING)

    def push(self, now: float) -> None:
        """Queue an export of the metrics at this Unix time; never waits for the network."""
        # The last push of a stopping agent may run while its job pushes.
        with self._lock:
            content = self._requests.request(self._read(now)).SerializeToString()
        if self._gzipped:
            content = gzip.compress(content, _GZIP_LEVEL)
        self.forwarder.forward(Export(content, self._gzipped))

    def _count_rejected(self, response: bytes) -> None:
        """Count the points that a partial success left out: OTLP forbids to send them again."""
        try:
            partial = ExportMetricsServiceResponse.FromString(response).partial_success
        except DecodeError:
            # Some endpoints respond with a text.
            return
        if partial.rejected_data_points > 0:
            _LOG.warning("metrics that the endpoint refused: %s", partial.error_message)
            self._counter.points_rejected(partial.rejected_data_points)
