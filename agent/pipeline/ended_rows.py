"""Stores what only engines' plugins know: rows of their own, and figures that came late."""

from collections.abc import Callable

from agent.analysis.engine_figures import own_record
from agent.analysis.verdicts import Judge
from agent.catalog.reasons import StoreWrite
from agent.errors import StoreUnavailable
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.ended_requests import EndedRequests
from agent.pipeline.request_pipeline import OnCounted
from agent.store.amending import Amend
from agent.store.writing import RequestWriter


class EndedRows:
    """Gives rows to ended requests that have none, and figures to rows that lack them.

    A job calls `store` each second. Where the database is away, the same is stored later.
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
        """`model_of` is the model that an engine serves now."""
        self._on_counted = on_counted
        self.ended = ended
        self._meter = meter
        self._agent = agent
        self._judge = judge
        self._writer = writer
        self._amend = amend
        self._model_of = model_of

    def store(self, now: float) -> None:
        """Store what is due."""
        try:
            self._store_own_rows(now)
            self._store_late()
        except StoreUnavailable:
            self._meter.store_failed(StoreWrite.PLUGIN_FIGURES)

    def store_last(self, now: float) -> None:
        """Store what no other record can follow, at the end of the agent."""
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
        # They are no spans.
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
