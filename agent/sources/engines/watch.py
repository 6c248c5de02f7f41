"""The watch over one engine: a page at every poll."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import requests

from agent.analysis.failures.restarts import restart_between
from agent.catalog.reasons import INTERNAL, FetchFailed, model_unknown
from agent.errors import EngineUnreachable, PageUnreadable
from agent.records.engine import EngineSample
from agent.sources.engines.directory import EngineDirectory
from agent.sources.engines.fetch import fetch
from agent.sources.engines.models import read_model
from agent.sources.engines.page import read_page
from agent.sources.engines.translate import AUTO, Reading, dialects_of, translate, wanted_series

_LOG = logging.getLogger(__name__)

# An engine that will not name its model is asked again, but not at every poll.
_ASK_MODEL_EVERY_POLLS = 12
# Where these are the reason, another path of the same engine would fail alike.
_NO_ANSWER = (FetchFailed.CONNECTION, FetchFailed.TIMEOUT)


@dataclass(frozen=True, slots=True)
class EngineSinks:
    """Where a watch hands what it saw.

    `on_failure` gets the engine and a short reason to count: once for a poll that failed, and
    once for each reason for which a poll dropped something and went on.
    """

    on_sample: Callable[[EngineSample], None]
    on_failure: Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class PageLook:
    """What one poll came to: a sample, or the short reason why there is none."""

    sample: EngineSample | None = None
    failure: str | None = None


class EngineWatch:
    """Polls one engine. Its own failures go to `on_failure`; only a sink's failure leaves `poll`.

    One poll at a time: a watch is not made for calls from two threads at once.
    """

    def __init__(
        self,
        *,
        name: str,
        url: str,
        kind: str = AUTO,
        session: requests.Session,
        directory: EngineDirectory,
        sinks: EngineSinks,
        timeout_s: float = 4.0,
    ) -> None:
        self.name = name
        self._url = url.rstrip("/")
        self._session = session
        self._directory = directory
        self._sinks = sinks
        self._timeout_s = timeout_s
        self._dialects = dialects_of(kind)
        self._wanted = wanted_series(self._dialects)
        self._paths = list(dict.fromkeys(dialect.metrics_path for dialect in self._dialects))
        self._last: EngineSample | None = None
        self._failing: str | None = None
        self._polls_until_ask = 0

    def poll(self, now: float) -> PageLook:
        """Read the engine once; `now` is Unix time. What was seen goes to the sinks too."""
        try:
            reading = self._read()
            sample = self._sample(reading, now)
            restarted = self._last is not None and restart_between(self._last, sample) is not None
            sample = replace(sample, model=self._model(reading, restarted=restarted))
        except (EngineUnreachable, PageUnreadable) as error:
            return self._failed(error)
        except Exception:
            # A page can be broken in a way that nobody thought of, and the watch must go on.
            _LOG.exception("engine %s: the poll failed inside the agent", self.name)
            self._sinks.on_failure(self.name, INTERNAL)
            return PageLook(failure=INTERNAL)
        self._report(sample, reading.dropped)
        return PageLook(sample=sample)

    def _read(self) -> Reading:
        errors: list[EngineUnreachable | PageUnreadable] = []
        for path in self._paths:
            try:
                body = fetch(self._session, self._url + path, timeout_s=self._timeout_s)
                reading = translate(read_page(body, self._wanted), self._dialects)
            except (EngineUnreachable, PageUnreadable) as error:
                errors.append(error)
                if error.reason in _NO_ANSWER:
                    break
            else:
                self._paths.sort(key=lambda other: other != path)
                return reading
        raise errors[0]

    def _sample(self, reading: Reading, now: float) -> EngineSample:
        sample = EngineSample(
            engine=self.name,
            at=now,
            dialect=reading.dialect.engine,
            model=reading.model,
            facts=reading.facts,
            histograms=reading.histograms,
            process_started_at=reading.process_started_at,
        )
        ranks = {
            rank: replace(sample, facts=facts, histograms={})
            for rank, facts in reading.ranks.items()
        }
        return replace(sample, ranks=ranks)

    def _model(self, reading: Reading, *, restarted: bool) -> str | None:
        """The model that the page names, or the engine was found to serve since it started."""
        known = reading.model or (None if restarted else self._directory.model_of(self.name))
        self._polls_until_ask -= 1
        if known is None and (restarted or self._polls_until_ask < 0):
            self._polls_until_ask = _ASK_MODEL_EVERY_POLLS
            known = self._asked_model(reading.dialect.model_path)
        self._directory.learn_model(self.name, known)
        return known

    def _asked_model(self, path: str) -> str | None:
        try:
            body = fetch(self._session, self._url + path, timeout_s=self._timeout_s)
            return read_model(path, body)
        except (EngineUnreachable, PageUnreadable) as error:
            _LOG.warning("engine %s does not name its model: %s", self.name, error)
            self._sinks.on_failure(self.name, model_unknown(error.reason))
            return None

    def _report(self, sample: EngineSample, dropped: Mapping[str, int]) -> None:
        self._last = sample
        if self._failing is not None:
            _LOG.info("engine %s can be read again", self.name)
            self._failing = None
        for reason in dropped:
            self._sinks.on_failure(self.name, reason)
        self._sinks.on_sample(sample)

    def _failed(self, error: EngineUnreachable | PageUnreadable) -> PageLook:
        if error.reason != self._failing:
            _LOG.warning("engine %s cannot be read: %s", self.name, error)
            self._failing = error.reason
        self._sinks.on_failure(self.name, error.reason)
        return PageLook(failure=error.reason)
