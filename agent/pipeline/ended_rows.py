"""Stores own rows of ended requests without a record, and figures that came after their row."""

from collections.abc import Callable

from agent.analysis.joined_record import own_record
from agent.analysis.verdicts import Judge
from agent.catalog.reasons import StoreWrite
from agent.errors import StoreUnavailable
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.ended_requests import EndedRequests
from agent.pipeline.request_pipeline import OnCounted
from agent.store.amending import Amend
from agent.store.writing import RequestWriter


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
    ) -> None:
        """`model_of` returns the model that an engine serves now."""
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
            self._store_late()
        except StoreUnavailable:
            self._meter.store_failed(StoreWrite.PLUGIN_FIGURES)

    def store_last(self, now: float) -> None:
        """The same at the end of the agent, also for requests that no record can follow."""
        self.ended.hurry()
        self.store(now)

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
        self._meter.stored(result.counted, sent=0, new=0)
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
