"""Requests that engines' plugins report.

Those that the engine ended are held for their records, else stored as rows of their own. Those that
the middleware saw are stored, and their spans left out.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from agent.analysis.joined_record import (
    difference,
    engine_ids,
    is_same,
    own_record,
    served_row,
    with_figures,
)
from agent.analysis.verdicts import Judge
from agent.catalog.reasons import PluginDropped, ProxyFailure, StoreWrite
from agent.errors import StoreUnavailable
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.request_pipeline import ClientLabels, OnCounted
from agent.records.engine import EndedRequest, EngineStep, ServedRequest
from agent.records.request import RequestRecord, Vantage
from agent.sources.open_requests import OpenRequest
from agent.sources.plugin_records import open_request
from agent.store.transactions import Amend
from agent.store.writing import RequestWriter

# A span comes 5 s after the end of its request, or later if it is sent again.
OWN_ROW_AFTER_S = 30.0
# The proxy's record of a slow client comes long after the engine ended the request; until then the
# request has its own row.
OWN_ROW_KEPT_S = 3600.0
# A record that comes before its ended request is held this long: a span comes before the end of its
# HTTP request if the client reads slowly, or while other choices go on.
EARLY_S = 300.0

# 30 s of 2,000 requests/s.
MAX_WAITING = 65_536
# Each takes 4 KB until it is stored, and half of that for each choice after the first.
MAX_SERVED = 16_384
# A sender repeats spans for some minutes at most.
WITH_ROW_KEPT_S = 300.0
MAX_WITH_ROWS = 65_536
MAX_OWN_ROWS = 32_768
MAX_EARLY = 8_192
_MAX_DUE = 4_096
# Of the requests with one id, only this many of the newest are compared.
_OF_ONE_ID = 64

Key = tuple[str, str]


@dataclass(slots=True, eq=False)
class _Held:
    """An ended request, the keys of the rows that have its figures, and the key of its own row.

    It is `served` if the middleware saw it: then its row needs no span.
    `at` is the time of its arrival by the monotonic clock.
    """

    ended: EndedRequest
    at: float
    rows: dict[Vantage, Key] = field(default_factory=dict)
    own_row: Key | None = None
    served: bool = False


@dataclass(slots=True, eq=False)
class _Early:
    """A record that came before its ended request."""

    record: RequestRecord
    ids: tuple[str, ...]
    at: float


@dataclass(frozen=True, slots=True)
class LateFigures:
    """An ended request whose row was stored without its figures, and the key of this row."""

    key: Key
    ended: EndedRequest


class EndedRequests:
    """Adds the figures of ended requests to records, and finds ended requests without a record.

    It is a consumer of PluginReceiver, whose thread calls `on_ended`; any thread may call the other
    methods. No record waits here: one without figures is stored, and gets its figures later.
    """

    def __init__(
        self,
        engines: set[str],
        on_dropped: Callable[[str, PluginDropped, int], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        has_proxy: bool = False,
    ) -> None:
        """`engines` are those with a plugin, to which those are added whose plugin reports. An
        agent that `has_proxy` takes its records of requests that came through it."""
        self.has_proxy = has_proxy
        self._engines = engines
        self._on_dropped = on_dropped
        self._clock = clock
        self._lock = threading.Lock()
        self._by_id: dict[str, deque[_Held]] = {}
        # Each in the order of arrival. A request waits for its record; it is due when none came in
        # time; then it has a row of its own.
        self._waiting: deque[_Held] = deque()
        self._due: deque[_Held] = deque()
        self._own_rows: deque[_Held] = deque()
        self._early_by_id: dict[str, deque[_Early]] = {}
        self._early: deque[_Early] = deque()
        self._served: deque[ServedRequest] = deque()
        # The choices of requests that the middleware saw, for spans that come later.
        self._with_rows: deque[_Held] = deque()
        self._late: list[LateFigures] = []
        self._superseded: list[Key] = []
        # The records in place of own rows, which were counted.
        self._replacing: OrderedDict[Key, None] = OrderedDict()

    @property
    def held(self) -> int:
        """How many ended requests are held."""
        held = (self._waiting, self._due, self._own_rows, self._with_rows)
        return sum(map(len, held))

    def on_step(self, step: EngineStep) -> None:
        """Do nothing: a step belongs to no single request."""

    def on_ended(self, ended: EndedRequest) -> None:
        """Hold an ended request; a record that came before gets its figures later."""
        with self._lock:
            self._engines.add(ended.engine)
            if len(self._waiting) + len(self._due) >= MAX_WAITING:
                self._on_dropped(ended.engine, PluginDropped.TOO_MANY_WAIT, 1)
                return
            held = _Held(ended, self._clock())
            early = self._take_early(ended)
            if early is not None:
                key = _key(early.record)
                held.rows[early.record.vantage] = key
                self._late.append(LateFigures(key, ended))
            self._by_id.setdefault(ended.request_id, deque()).append(held)
            self._waiting.append(held)

    def on_served(self, served: ServedRequest) -> None:
        """Keep a request that the middleware saw until it is stored. A span of it that came before
        loses its row."""
        if self.has_proxy and served.proxied:
            for ended in served.choices:
                self.on_ended(ended)
            return
        with self._lock:
            if len(self._served) >= MAX_SERVED or len(self._with_rows) >= MAX_WITH_ROWS:
                engine = served.record.engine or ""
                self._on_dropped(engine, PluginDropped.TOO_MANY_WAIT, 1)
                return
            self._served.append(served)
            for ended in served.choices:
                self._engines.add(ended.engine)
                early = self._take_early(ended)
                if early is not None:
                    self._superseded.append(_key(early.record))
                rows = {Vantage.PROXY: _key(served.record)}
                held = _Held(ended, self._clock(), rows, served=True)
                self._by_id.setdefault(ended.request_id, deque()).append(held)
                self._with_rows.append(held)

    def take_served(self) -> list[ServedRequest]:
        """Requests that the middleware saw, _MAX_DUE at most."""
        with self._lock:
            return [self._served.popleft() for _ in range(min(len(self._served), _MAX_DUE))]

    def give_back_served(self, served: Sequence[ServedRequest]) -> None:
        """Keep them for the next call: the database is away."""
        with self._lock:
            self._served.extendleft(reversed(served))

    def complete(self, record: RequestRecord) -> RequestRecord | None:
        """The record with the figures of its ended request, if this has come; None of a span whose
        request the middleware saw."""
        if record.vantage is Vantage.ENGINE and record.engine in self._engines:
            with self._lock:
                found = self._found(record, engine_ids(record))
                if found and found[0].served:
                    found[0].rows[record.vantage] = _key(record)
                    return None
        return self.with_figures(record)

    def with_figures(self, record: RequestRecord) -> RequestRecord:
        """The record with the figures of its ended request, if this has come."""
        if record.engine not in self._engines:
            return record
        ids = engine_ids(record)
        with self._lock:
            found = self._found(record, ids)
            if not found:
                self._remember(record, ids)
                return record
            key = _key(record)
            for held in found:
                held.rows[record.vantage] = key
                if held.own_row is not None:
                    self._superseded.append(held.own_row)
                    held.own_row = None
                    self._replace(key)
        return with_figures(record, [held.ended for held in found])

    def hurry(self) -> None:
        """Make requests due whose client left: the engine sends no span of them."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
            for held in waiting:
                left = held.ended.finish_reason == "abort"
                (self._due if left else self._waiting).append(held)

    def due(self) -> list[EndedRequest]:
        """Ended requests without a record in time, _MAX_DUE at most; each gets its own row now."""
        now = self._clock()
        with self._lock:
            while self._waiting and now - self._waiting[0].at >= OWN_ROW_AFTER_S:
                self._due.append(self._waiting.popleft())
            while self._with_rows and now - self._with_rows[0].at >= WITH_ROW_KEPT_S:
                self._forget(self._with_rows.popleft())
            while self._own_rows and (
                now - self._own_rows[0].at >= OWN_ROW_KEPT_S or len(self._own_rows) > MAX_OWN_ROWS
            ):
                self._forget(self._own_rows.popleft())
            due: list[_Held] = []
            while self._due and len(due) < _MAX_DUE:
                held = self._due.popleft()
                if held.rows:
                    self._forget(held)
                else:
                    due.append(held)
            self._due.extendleft(reversed(due))
        return [held.ended for held in due]

    def stored(self, keys: Mapping[EndedRequest, Key]) -> None:
        """Note the keys of the own rows that were stored; until then the requests stay due.

        If a record came while the row was stored, the row is superseded.
        """
        with self._lock:
            while self._due and self._due[0].ended in keys:
                held = self._due.popleft()
                key = keys[held.ended]
                if held.rows:
                    self._superseded.append(key)
                    self._forget(held)
                    for replacing in held.rows.values():
                        self._replace(replacing)
                else:
                    held.own_row = key
                    self._own_rows.append(held)

    def was_counted(self, record: RequestRecord) -> bool:
        """Whether the request was counted by its own row, which the record replaced."""
        if not self._replacing:
            return False
        of_proxy = (record.trace_id, record.proxy_span_id or "")
        with self._lock:
            return _key(record) in self._replacing or of_proxy in self._replacing

    def take_late(self) -> tuple[list[LateFigures], list[Key]]:
        """Late figures of stored rows, and the keys of superseded own rows; each only once."""
        with self._lock:
            late, self._late = self._late, []
            superseded, self._superseded = self._superseded, []
        return late, superseded

    def give_back(self, late: Sequence[LateFigures], superseded: Sequence[Key]) -> None:
        """Keep the results of `take_late` for the next call: the database is away."""
        with self._lock:
            self._late = [*late, *self._late][:MAX_EARLY]
            self._superseded = [*superseded, *self._superseded][:MAX_EARLY]

    def _found(self, record: RequestRecord, ids: Sequence[str]) -> list[_Held]:
        """The ended requests of a record, one for each choice, the most similar first."""
        key = _key(record)
        candidates = [
            held
            for each in ids
            for held in islice(reversed(self._by_id.get(each, ())), _OF_ONE_ID)
            # The same record may come again: its sender repeats an export that was not stored.
            if held.rows.get(record.vantage, key) == key and is_same(record, held.ended)
        ]
        candidates.sort(key=lambda held: difference(record, held.ended))
        choices = 1 if record.proxied is None else record.proxied.choices or 1
        return candidates[:choices]

    def _replace(self, key: Key) -> None:
        self._replacing[key] = None
        if len(self._replacing) > MAX_OWN_ROWS:
            self._replacing.popitem(last=False)

    def _remember(self, record: RequestRecord, ids: tuple[str, ...]) -> None:
        now = self._clock()
        while self._early and (now - self._early[0].at >= EARLY_S or len(self._early) >= MAX_EARLY):
            self._forget_early(self._early.popleft())
        if ids:
            early = _Early(record, ids, now)
            self._early.append(early)
            for each in ids:
                self._early_by_id.setdefault(each, deque()).append(early)

    def _take_early(self, ended: EndedRequest) -> _Early | None:
        newest = islice(reversed(self._early_by_id.get(ended.request_id, ())), _OF_ONE_ID)
        candidates = [early for early in newest if is_same(early.record, ended)]
        if not candidates:
            return None
        found = min(candidates, key=lambda early: difference(early.record, ended))
        self._forget_early(found)
        # It stays in `_early` until EARLY_S have passed, under no id.
        found.ids = ()
        return found

    def _forget_early(self, early: _Early) -> None:
        for each in early.ids:
            _take_out(self._early_by_id, each, early)

    def _forget(self, held: _Held) -> None:
        _take_out(self._by_id, held.ended.request_id, held)


def _key(record: RequestRecord) -> Key:
    return record.trace_id, record.span_id


_Value = TypeVar("_Value")


def _take_out(by_id: dict[str, deque[_Value]], request_id: str, value: _Value) -> None:
    left = by_id[request_id]
    left.remove(value)
    if not left:
        del by_id[request_id]


class EndedRows:
    """Stores own rows for ended requests without a record, and late figures into stored rows.

    A job calls `store` each second. While the database is away, they wait for a later call.
    """

    def __init__(
        self,
        ended: EndedRequests,
        meter: Meter,
        *,
        agent: str,
        judge: Judge,
        writer: RequestWriter,
        amend: Amend,
        model_of: Callable[[str], str | None],
        on_counted: OnCounted,
        labels: ClientLabels,
        now: Callable[[], float],
    ) -> None:
        """`model_of` returns the model that an engine serves now, `labels` bounds what clients
        wrote."""
        self._labels = labels
        self._now = now
        self._on_counted = on_counted
        self.ended = ended
        self._meter = meter
        self._agent = agent
        self._judge = judge
        self._writer = writer
        self._amend = amend
        self._model_of = model_of

    def store(self, now: float) -> None:
        """Store own rows that are due, and late figures; `now` is Unix time."""
        try:
            self._store_own_rows(now)
            self._store_served()
            self._store_late()
        except StoreUnavailable:
            self._meter.store_failed(StoreWrite.PLUGIN_FIGURES)

    def store_last(self, now: float) -> None:
        """The same at the end of the agent, also for requests that no record can follow."""
        self.ended.hurry()
        self.store(now)

    def on_front_ended(self, engine: str, requests: Sequence[OpenRequest]) -> None:
        """Store the requests that ended with their front, as failed ones.

        Raises StoreUnavailable; then they come again.
        """
        now = self._now()
        found = [open_request(each.record, engine, each.heard_at, now) for each in requests]
        for each in found:
            if isinstance(each, PluginDropped):
                self._meter.plugin_dropped(engine, each, 1)
        served = [each for each in found if isinstance(each, ServedRequest)]
        self._store([each for each in served if not (each.proxied and self.ended.has_proxy)])

    def _store_served(self) -> None:
        while served := self.ended.take_served():
            try:
                self._store(served)
            except StoreUnavailable:
                self.ended.give_back_served(served)
                raise

    def _store(self, served: Sequence[ServedRequest]) -> None:
        rows = [served_row(each)._replace(agent=self._agent) for each in served]
        judged = [self._judge.judged(self._labels.labelled(row)) for row in rows]
        result = self._writer.submit(judged).result()
        for _ in result.refused:
            self._meter.proxy_failed(ProxyFailure.RECORD_REFUSED)
        self._meter.stored(result.counted, sent=0, new=0, final=result.final)
        self._on_counted(result.counted)

    def _store_own_rows(self, now: float) -> None:
        due = self.ended.due()
        if not due:
            return
        records = {
            ended: own_record(
                ended, agent=self._agent, model=self._model_of(ended.engine), received_at=now
            )
            for ended in due
        }
        judged = [self._judge.judged(record) for record in records.values()]
        result = self._writer.submit(judged).result()
        # No span was received for them.
        self._meter.stored(result.counted, sent=0, new=0, final=result.final)
        self._on_counted(result.counted)
        self.ended.stored(
            {ended: (record.trace_id, record.span_id) for ended, record in records.items()}
        )

    def _store_late(self) -> None:
        late, superseded = self.ended.take_late()
        if not late and not superseded:
            return
        try:
            self._amend({each.key: each.ended for each in late}, superseded)
        except StoreUnavailable:
            self.ended.give_back(late, superseded)
            raise
