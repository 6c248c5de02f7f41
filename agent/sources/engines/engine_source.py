"""The source of one engine's metrics and models: each read is one scrape of its exposition."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import requests

from agent.analysis.failures.progress import restart_between
from agent.catalog.engine_facts import FACT_MISSING, SCRAPE_DURATION
from agent.catalog.engines import DIALECTS
from agent.catalog.other_programs import other_program
from agent.catalog.reasons import INTERNAL, NO_ANSWER, ExpositionFault, model_unknown
from agent.catalog.routers import ROUTERS
from agent.errors import EngineUnreachable, ExpositionUnreadable, ReadFailed
from agent.http_client import http_session
from agent.records.engine import EngineSample
from agent.records.gpu import Facts
from agent.sources.engines.exposition import Exposition, bounded_label, read_exposition
from agent.sources.engines.fetch import fetch, shown_url
from agent.sources.engines.kept_counts import KeptCounts
from agent.sources.engines.translate import (
    AUTO,
    NameDrift,
    TranslatedExposition,
    dialects_of,
    translate,
    wanted_series,
)

SERVED_PATH = "/v1/models"
VERSION_PATH = "/version"


def read_model(path: str, body: bytes) -> str | None:
    """The model named by the response at `path`, None when it is unknown.

    Raises ExpositionUnreadable (`json_malformed`) for a body that is not JSON.
    """
    response = _read(path, body)
    name = _READERS[path](response) if isinstance(response, dict) else None
    return bounded_label(name) if isinstance(name, str) and name else None


def read_served(body: bytes) -> frozenset[str]:
    """Every model name in the response of SERVED_PATH, adapters included.

    Raises ExpositionUnreadable (`json_malformed`) for a body that is not JSON.
    """
    response = _read(SERVED_PATH, body)
    listed = response.get("data") if isinstance(response, dict) else None
    entries = listed if isinstance(listed, list) else []
    names = [entry.get("id") for entry in entries if isinstance(entry, dict)]
    return frozenset(bounded_label(name) for name in names if isinstance(name, str) and name)


def read_version(session: requests.Session, url: str, *, timeout_s: float = 4.0) -> str | None:
    """The version at VERSION_PATH of an engine; None if the response names none.

    Raises EngineUnreachable, and ExpositionUnreadable for a body that is not JSON.
    """
    body = fetch(session, url.rstrip("/") + VERSION_PATH, timeout_s=timeout_s)
    response = _read(VERSION_PATH, body)
    version = response.get("version") if isinstance(response, dict) else None
    return bounded_label(version) if isinstance(version, str) and version else None


def _read(path: str, body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ExpositionUnreadable(
            ExpositionFault.JSON_MALFORMED, f"is not JSON: {error}", where=path
        ) from error


def _only_base_model(response: Mapping[str, Any]) -> object:
    """The first id, when all entries except adapters (they have a parent) have one root."""
    listed = response.get("data")
    entries = listed if isinstance(listed, list) else []
    bases = [entry for entry in entries if isinstance(entry, dict) and not entry.get("parent")]
    roots = {str(entry.get("root") or entry.get("id")) for entry in bases}
    return bases[0].get("id") if len(roots) == 1 else None


def _model_id(response: Mapping[str, Any]) -> object:
    return response.get("model_id")


_READERS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    SERVED_PATH: _only_base_model,
    "/info": _model_id,
}

_LOG = logging.getLogger(__name__)


class ServedModels:
    """Reads the model names of one engine."""

    def __init__(
        self, name: str, url: str, session: requests.Session, *, timeout_s: float = 4.0
    ) -> None:
        self.name = name
        self._url = url.rstrip("/") + SERVED_PATH
        self._session = session
        self._timeout_s = timeout_s
        self._failing = False

    def read(self) -> frozenset[str] | None:
        """The names that the engine serves now; None when it does not list them."""
        try:
            served = read_served(fetch(self._session, self._url, timeout_s=self._timeout_s))
        except (EngineUnreachable, ExpositionUnreadable) as error:
            if not self._failing:
                _LOG.warning("engine %s does not list its models: %s", self.name, error)
            self._failing = True
            return None
        self._failing = False
        return served


# An engine that does not name its model is asked again, but not at every read.
_ASK_MODEL_EVERY_READS = 12


@dataclass(frozen=True, slots=True)
class ScrapeResult:
    """What one scrape gave: a sample, or the short reason of its failure and a sentence of it.

    `faults` are the reasons for which the scrape dropped something and went on.
    """

    sample: EngineSample | None = None
    failure: str | None = None
    problem: str | None = None
    faults: tuple[str, ...] = ()


class EngineSource:
    """Reads one engine. `read` raises nothing; it must not run in two threads at once."""

    def __init__(
        self,
        *,
        name: str,
        url: str,
        kind: str = AUTO,
        session: requests.Session | None = None,
        timeout_s: float = 4.0,
        before: EngineSample | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        read_path: Callable[[str], bytes] | None = None,
    ) -> None:
        """`before` is the last sample of an earlier run, with the facts that the engine gave.

        `read_path` reads a path of the engine in place of HTTP, and raises as `fetch` does.

        `monotonic` is a clock in seconds that is never set.
        """
        self.name = name
        session = session or http_session()
        self._url = shown_url(url).rstrip("/")
        self._fetch = read_path or (
            lambda path: fetch(session, url.rstrip("/") + path, timeout_s=timeout_s)
        )
        self._monotonic = monotonic
        self._dialects = dialects_of(kind)
        self._wanted = wanted_series(self._dialects)
        self._paths = list(dict.fromkeys(dialect.metrics_path for dialect in self._dialects))
        self._kept = KeptCounts(self._dialects)
        # The last sample of an earlier run, if it has anything that is not in the exposition.
        self._earlier = before if before is not None and before.kept else None
        self._drift = NameDrift(name, before)
        self._last: EngineSample | None = None
        self._failing: str | None = None
        self._model: str | None = None
        self._reads_until_ask = 0

    def read(self, now: float) -> ScrapeResult:
        """Scrape the engine once; `now` is Unix time."""
        faults: list[str] = []
        begun = self._monotonic()
        try:
            found = self._translated(faults)
            read_s = self._monotonic() - begun
            sample = self._sample(found, now, faults)
        except ReadFailed as error:
            return self._failed(error, faults)
        except Exception:
            # An exposition can be broken in an unforeseen way, and the next read must still come.
            _LOG.exception("engine %s: the scrape failed inside the agent", self.name)
            problem = "the scrape failed inside the agent: see its log"
            return ScrapeResult(failure=INTERNAL, problem=problem, faults=tuple(faults))
        sample = replace(sample, facts={**sample.facts, (SCRAPE_DURATION.name, ()): read_s})
        self._last = sample
        if self._failing is not None:
            _LOG.info("engine %s can be read again", self.name)
            self._failing = None
        return ScrapeResult(sample, faults=tuple(faults))

    def _translated(self, faults: list[str]) -> TranslatedExposition:
        errors: dict[str, ReadFailed] = {}
        for path in self._paths:
            try:
                exposition, found = self._read(self._fetch(path), path)
            except ReadFailed as error:
                errors[path] = error
                if error.reason in NO_ANSWER:
                    break
            else:
                self._paths.sort(key=lambda other: other != path)
                faults += found.dropped
                kept = self._kept.completed(exposition)
                if kept is None:
                    return found
                return found.counted_as(translate(kept, (found.dialect,)))
        raise _most_telling(errors)

    def _read(self, body: bytes, path: str) -> tuple[Exposition, TranslatedExposition]:
        """The series and facts of a body. The error names the program whose metrics it has."""
        where = self._url + path
        try:
            exposition = read_exposition(body, self._wanted)
            return exposition, translate(exposition, self._dialects)
        except ExpositionUnreadable as error:
            message = error.message
            if error.reason == ExpositionFault.NO_KNOWN_SERIES:
                message = self._instead(body) or message
            raise ExpositionUnreadable(error.reason, message, where=where) from error

    def _instead(self, body: bytes) -> str | None:
        """What has these metrics, none of which is of the engine that is looked for."""
        for dialect in DIALECTS.values():
            if dialect not in self._dialects and _has_any(body, dialect.prefixes):
                return f"has the metrics of {dialect.engine}, which `kind` in the settings excludes"
        if program := other_program(body):
            place = "; a router's own metrics go under `routers`" if program in _ROUTERS else ""
            return (
                f"has no series of a known engine: this looks like {program}; give the URL of the "
                f"engine{place}"
            )
        return None

    def _sample(self, found: TranslatedExposition, now: float, faults: list[str]) -> EngineSample:
        sample = EngineSample(
            engine=self.name,
            at=now,
            dialect=found.dialect.engine,
            model=found.model,
            facts=found.facts,
            histograms=found.histograms,
            process_started_at=found.process_started_at,
            families=found.families,
            kept=found.kept,
        )
        sample = self._with_earlier(sample)
        ranks = {
            rank: replace(sample, facts=facts, histograms={}) for rank, facts in found.ranks.items()
        }
        restarted = self._last is not None and restart_between(self._last, sample) is not None
        self._learn_model(found, restarted, faults)
        facts = dict(sample.facts)
        for name in self._drift.gone(sample, found.dialect):
            facts[FACT_MISSING.name, (name,)] = 1.0
        return replace(sample, ranks=ranks, model=self._model, facts=facts)

    def _with_earlier(self, sample: EngineSample) -> EngineSample:
        """The sample with what an earlier run of the agent kept, until the engine restarts."""
        if self._earlier is None:
            return sample
        kept = self._earlier.kept
        whole = replace(sample, facts=_sums(sample.facts, kept), kept=_sums(kept, sample.kept))
        if restart_between(self._last or self._earlier, whole) is None:
            return whole
        self._earlier = None
        return sample

    def _learn_model(self, found: TranslatedExposition, restarted: bool, faults: list[str]) -> None:
        """Keep the model of the exposition, or the one that was asked for since the start."""
        self._model = found.model or (None if restarted else self._model)
        self._reads_until_ask -= 1
        if self._model is None and (restarted or self._reads_until_ask < 0):
            self._reads_until_ask = _ASK_MODEL_EVERY_READS
            self._model = self._read_model(found.dialect.model_path, faults)

    def _read_model(self, path: str, faults: list[str]) -> str | None:
        try:
            body = self._fetch(path)
            return read_model(path, body)
        except (EngineUnreachable, ExpositionUnreadable) as error:
            _LOG.warning("engine %s does not name its model: %s", self.name, error)
            faults.append(model_unknown(error.reason))
            return None

    def _failed(self, error: ReadFailed, faults: list[str]) -> ScrapeResult:
        if error.reason != self._failing:
            _LOG.warning("engine %s cannot be read: %s", self.name, error)
            self._failing = error.reason
        return ScrapeResult(failure=error.reason, problem=str(error), faults=tuple(faults))


def _has_any(body: bytes, prefixes: Sequence[str]) -> bool:
    return any(f"\n{prefix}".encode() in body for prefix in prefixes)


def _sums(facts: Facts, more: Facts) -> Facts:
    return {**facts, **{key: facts.get(key, 0.0) + value for key, value in more.items()}}


def _most_telling(errors: Mapping[str, ReadFailed]) -> ReadFailed:
    """The error of the first path that the server has; with 404 at all paths, one of them all."""
    first = next(iter(errors.values()))
    if len(errors) == 1:
        return first
    found = [error for error in errors.values() if error.status != _NO_SUCH_PATH]
    if found:
        return found[0]
    message = f"{first.message}, nor {' or '.join(list(errors)[1:])}"
    return type(first)(first.reason, message, where=first.where, status=first.status)


_NO_SUCH_PATH = 404
_ROUTERS = frozenset(router.engine for router in ROUTERS)
