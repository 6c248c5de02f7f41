"""Chooses the engine for a request: the one with the fewest open requests that serves the model."""

import math
import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from agent.catalog.metrics import OTHER
from agent.catalog.reasons import EjectionReason
from agent.sources.proxy.engine_connection import EngineConnection
from agent.sources.proxy.outlier_detection import OutlierDetection, OutlierLimits

_COUNT_BYTES = 8


class OpenRequests(Mapping[str, int]):
    """The open requests by engine, over all workers, in memory that they share.

    Made before the workers are forked; each writes its own row alone. `descriptor` is the memory of
    an earlier run, whose engines these are.
    """

    def __init__(
        self, engines: Sequence[str], workers: int = 1, descriptor: int | None = None
    ) -> None:
        self._indexes = {name: index for index, name in enumerate(engines)}
        if descriptor is None:
            descriptor = os.memfd_create("open-requests")
            os.ftruncate(descriptor, _COUNT_BYTES * max(1, workers * len(self._indexes)))
        self.descriptor = descriptor
        self._counts = memoryview(mmap.mmap(descriptor, 0)).cast("q")
        self._row = 0

    def begin(self, worker: int) -> int:
        """Count as this worker, from zero; returns how many the worker before it left open."""
        self._row = worker * len(self._indexes)
        own = slice(self._row, self._row + len(self._indexes))
        left = sum(self._counts[own])
        for index in range(own.start, own.stop):
            self._counts[index] = 0
        return left

    def add(self, engine: str, change: int) -> None:
        """Change the count of this worker."""
        self._counts[self._row + self._indexes[engine]] += change

    def __getitem__(self, engine: str) -> int:
        return sum(self._counts[self._indexes[engine] :: len(self._indexes)])

    def __iter__(self) -> Iterator[str]:
        return iter(self._indexes)

    def __len__(self) -> int:
        return len(self._indexes)


_CHECK_EVERY_S = 1.0
# Others say that the request, or the engine's configuration, is wrong (RFC 9110 15.6).
FAILED = frozenset((500, 502, 504))
_UNAVAILABLE = 503
THROTTLING = frozenset((429, _UNAVAILABLE))


# Routes of vLLM, SGLang, TGI and llama.cpp. A client may name any other.
COUNTED_ROUTES = frozenset(
    {
        *("/v1/embeddings", "/embeddings", "/embed", "/pooling", "/classify", "/v1/classify"),
        *("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
        *("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech"),
        *("/v1/images/generations", "/tokenize", "/detokenize", "/generate", "/completion"),
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
        *("/v1/models", "/health", "/metrics", "/version"),
    }
)


@dataclass(frozen=True, slots=True)
class ProxiedEngine:
    """An engine behind the proxy, by its name in the settings."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class EngineLookup:
    """What the rest of the agent knows about an engine, by name, looked up on each request.

    `models` returns None while the engine's models are unknown.
    """

    models: Callable[[str], frozenset[str] | None]
    healthy: Callable[[str], bool]


class LoadBalancer:
    """Orders the engines for each request and counts the open requests of each engine.

    `forced` counts the requests for which no engine was in the rotation, `retried` those that an
    engine did not take and that went to another one, `responses` those to unmeasured requests, by
    engine, route and class of status. Their owner may clear them.
    """

    def __init__(
        self,
        engines: Sequence[ProxiedEngine],
        lookup: EngineLookup,
        open_requests: OpenRequests | None = None,
        outliers: OutlierDetection | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_requests` are those of several workers together. Without `outliers` none fails."""
        self.engines = tuple(engines)
        self.outliers = outliers or OutlierDetection((), OutlierLimits())
        self.monotonic = monotonic
        self.attempts: set[Attempt] = set()
        self.open_requests = open_requests or OpenRequests([engine.name for engine in engines])
        self.forced = 0
        self.retried: Counter[str] = Counter()
        self.responses: Counter[tuple[str, str, int]] = Counter()
        self._lookup = lookup
        self._turn = count()
        self._checked_s = -math.inf

    def candidates(
        self, model: str | None, *, probes: bool = False, but: ProxiedEngine | None = None
    ) -> Sequence[ProxiedEngine]:
        """Return the engines to try for a model, best first; equal engines take turns.

        An ejected engine that is due comes first, if the request `probes`. If no engine that serves
        the model is in the rotation, all of these are tried, the least bad first: what is known may
        be out of date, and an engine without the model would blame the client's request (404). The
        same holds for a model that no engine is known to serve, and all engines. With `but`, those
        of the rotation alone come back, without that engine.
        """
        if len(self.engines) == 1:
            return () if but else self.engines
        now_s = self.monotonic()
        self._check(now_s)
        serving = [e for e in self.engines if self.lists(e, model)]
        possible = serving or list(self.engines)
        healthy = [e for e in possible if self._lookup.healthy(e.name)]
        inside = [e for e in healthy if e is not but and self.outliers.is_in(e.name, now_s)]
        if but is not None:
            return self._ordered(inside)
        due = [e for e in healthy if probes and self.outliers.is_due(e.name, now_s)][:1]
        if inside:
            return [*due, *self._ordered(inside)]
        self.forced += not due
        ejected = self.outliers.ejections
        bad = {e: 2 if e not in healthy else 1 if e.name in ejected else 0 for e in possible}
        left = [e for e in self._ordered(possible) if e not in due]
        return [*due, *sorted(left, key=bad.__getitem__)]

    def count_response(self, engine: str, path: str, status: int) -> None:
        """Count an engine's response to a request that is not measured."""
        self.responses[engine, path if path in COUNTED_ROUTES else OTHER, status // 100] += 1

    def lists(self, engine: ProxiedEngine, model: str | None) -> bool:
        """Return whether an engine is known to serve a model."""
        return model in (self._lookup.models(engine.name) or ())

    def _ordered(self, engines: list[ProxiedEngine]) -> list[ProxiedEngine]:
        if not engines:
            return engines
        turn = next(self._turn) % len(engines)
        in_turn = engines[turn:] + engines[:turn]
        return sorted(in_turn, key=lambda engine: self.open_requests[engine.name])

    def _check(self, now_s: float) -> None:
        """See now and then which engines are silent: nothing else shows an engine that hangs."""
        if now_s - self._checked_s < _CHECK_EVERY_S:
            return
        self._checked_s = now_s
        for attempt in self.attempts:
            attempt.check(now_s)
        self.outliers.check(now_s)


class Attempt:
    """One request at one engine, from the choice of the engine until its connection is free.

    It reports to outlier detection how the request went. Of a request that does not count, such as
    one for the list of models, only a lost connection says something of the engine.
    """

    __slots__ = (
        "_balancer",
        "_counts",
        "_good",
        "_sent_s",
        "_streams",
        "connection",
        "engine",
        "probe",
    )

    def __init__(self, balancer: LoadBalancer, engine: ProxiedEngine, *, counts: bool) -> None:
        self.engine = engine
        self.probe = counts and balancer.outliers.begin(engine.name, balancer.monotonic())
        self._balancer = balancer
        self._counts = counts
        self.connection: EngineConnection | None = None
        self._sent_s = 0.0
        self._streams = self._good = False
        balancer.open_requests.add(engine.name, 1)

    def sent(self, connection: EngineConnection) -> None:
        """Note that the request was sent."""
        self.connection, self._sent_s = connection, self._balancer.monotonic()
        if self._counts:
            self._balancer.attempts.add(self)
            self._balancer.outliers.sent(self.engine.name, self._sent_s)

    def failed(self, reason: EjectionReason, detail: str | None = None) -> None:
        """Note that the engine failed on the request."""
        self._balancer.outliers.failed(
            self.engine.name,
            reason,
            self._balancer.monotonic(),
            probe=self._taken_probe(),
            detail=detail,
        )

    def answered(self, status: int, retry_after_s: float | None, detail: str | None = None) -> None:
        """Note the status of the response, or the one that an error inside it stands for."""
        if not self._counts:
            return
        if status >= 400:
            self._balancer.outliers.refused(self.engine.name)
        if status in THROTTLING:
            self._balancer.outliers.throttled(
                self.engine.name,
                retry_after_s,
                self._balancer.monotonic(),
                probe=self._taken_probe(),
                busy=status == _UNAVAILABLE,
            )
        elif status in FAILED:
            self.failed(EjectionReason.ERROR, detail or str(status))

    def completed(self, status: int) -> None:
        """Note that the whole response came. One with a 4xx says nothing of the engine's model."""
        if status < 400:
            self._succeed(self._balancer.monotonic())

    def check(self, now_s: float) -> None:
        """Note what the response shows so far. A stream is good once it has gone on for a while."""
        connection = self.connection
        if connection is None:
            return
        if connection.status is not None and connection.read_at_s > connection.head_at_s:
            self._balancer.outliers.progressed(self.engine.name, connection.read_at_s)
            if self._streams and connection.status < 400:
                self._succeed(now_s)
            self._streams = True
        elif self.probe and self._balancer.outliers.hangs(self._sent_s, now_s):
            self.failed(EjectionReason.SILENT)

    def close(self) -> None:
        """Note that the engine has done with the request."""
        if self._taken_probe():
            self._balancer.outliers.abandoned(self.engine.name, self._balancer.monotonic())
        self._balancer.attempts.discard(self)
        self._balancer.open_requests.add(self.engine.name, -1)

    def _succeed(self, now_s: float) -> None:
        if self._counts and not self._good:
            self._good, self.probe = True, False
            self._balancer.outliers.succeeded(self.engine.name, self._sent_s, now_s)

    def _taken_probe(self) -> bool:
        """Whether this is the probe; asked again it is not."""
        probe, self.probe = self.probe, False
        return probe
