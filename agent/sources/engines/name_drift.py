"""Detects facts that an engine no longer gives, as after an upgrade that renamed metrics."""

import logging

from agent.catalog.engine_facts import (
    FACT_MISSING,
    OUTPUT_TOKENS,
    REQUEST_DURATION,
    REQUESTS_FINISHED,
    REQUESTS_RUNNING,
)
from agent.catalog.engine_flags import LIMIT_FLAGS
from agent.catalog.engines import DIALECTS, Dialect
from agent.records.engine import EngineSample
from agent.records.gpu import Facts

_LOG = logging.getLogger(__name__)

_LIMITS = frozenset(limit.name for limit in LIMIT_FLAGS)


class NameDrift:
    """Compares each sample of one engine with the earlier ones, also over restarts."""

    def __init__(self, engine: str, before: EngineSample | None = None) -> None:
        """`before` is the last sample of an earlier run of the agent: an upgrade of the engine
        often restarts the agent beside it. A stored sample has no histograms, and its limits may
        come from the settings."""
        self._engine = engine
        known: Facts = {} if before is None else before.facts
        self._dialect = None if before is None else DIALECTS.get(before.dialect)
        self._gone = frozenset(
            labels[0] for name, labels in known if name == FACT_MISSING.name and labels
        )
        self._seen = {name for name, _ in known} - _LIMITS | self._gone

    def gone(self, sample: EngineSample, dialect: Dialect) -> frozenset[str]:
        """The expected facts that were there before and are not in this sample."""
        if dialect is not self._dialect:
            self._dialect, self._seen, self._gone = dialect, set(), frozenset()
        present = frozenset(name for name, _ in sample.facts) | sample.histograms.keys()
        before = self._gone
        # Some engines create a series at its first use.
        missing = expected_facts(dialect) & self._seen if _has_worked(sample) else before
        self._gone = missing - present
        self._seen |= present
        if new := self._gone - before:
            _LOG.warning(
                "engine %s gives no %s any more: did an upgrade rename its series?",
                self._engine,
                ", ".join(sorted(new)),
            )
        if back := before - self._gone:
            _LOG.info("engine %s gives %s again", self._engine, ", ".join(sorted(back)))
        return self._gone


def expected_facts(dialect: Dialect) -> frozenset[str]:
    """The facts that every engine of a dialect gives once a request has finished."""
    return frozenset(metric.name for metric in dialect.facts.keys() - dialect.occasional)


def _has_worked(sample: EngineSample) -> bool:
    """Whether a request has finished since the start of the engine, by whatever it still gives."""
    finished = [
        value for (name, _), value in sample.facts.items() if name == REQUESTS_FINISHED.name
    ]
    durations = sample.histograms.get(REQUEST_DURATION.name)
    return bool(
        sum(finished)
        or (durations and durations.counts[-1])
        or (sample.fact(OUTPUT_TOKENS.name) and sample.fact(REQUESTS_RUNNING.name) == 0)
    )
