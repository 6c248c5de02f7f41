"""Reads once what an audit needs of an engine's own responses, and sends it one request."""

import json
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import requests

from agent.catalog.engines import DIALECTS
from agent.catalog.engines.vllm import VLLM
from agent.errors import EngineUnreachable, ReadFailed
from agent.http_client import connection_problem
from agent.records.audit import EngineEvidence, EvidencePart, TrialRequest
from agent.records.engine import HistogramSnapshot
from agent.sources.engines.engine_source import (
    SERVED_PATH,
    VERSION_PATH,
    EngineSource,
    read_version,
)
from agent.sources.engines.exposition import SeriesValue, read_exposition
from agent.sources.engines.fetch import (
    HealthProbe,
    fetch,
    headers_of,
    open_session,
    post,
    shown_url,
    status_of,
    status_text,
)
from agent.sources.engines.translate import expected_facts, merged_histogram

_TIMEOUT_S = 5.0
# A trial may wait behind the requests of others.
_TRIAL_WITHIN_S = 60.0
_TRIAL_PATH = "/v1/completions"
_TRIAL_TOKENS = 2

# The paths at which a client asks for text; the others fail for other reasons.
_FOR_TEXT = frozenset({_TRIAL_PATH, "/v1/chat/completions", "/v1/responses", "/v1/messages"})
_CONFIG = "cache_config_info"
_HISTOGRAMS = {
    "input_lengths": "request_prompt_tokens",
    "output_lengths": "request_generation_tokens",
    "step_tokens": "iteration_tokens_total",
}
_REQUESTS = "http_requests_total"

Series = Mapping[str, Sequence[SeriesValue]]


@dataclass(frozen=True, slots=True)
class EngineRead:
    """The evidence, and why parts of it are missing."""

    evidence: EngineEvidence
    unread: Mapping[EvidencePart, str]


class LiveEngine:
    """One engine by its URL; `key` is its API key, if it needs one.

    `ca` is a file of authorities that it is trusted by.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        kind: str = "auto",
        ca: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._url = url.rstrip("/")
        self._kind = kind
        self._clock = clock
        self._anonymous, self._session = open_session(ca), open_session(ca)
        if key is not None:
            self._session.headers["Authorization"] = f"Bearer {key}"

    def read(self) -> EngineRead:
        """Read everything once. Raises EngineUnreachable if nothing answers."""
        unread: dict[EvidencePart, str] = {}
        source = EngineSource(name="audited", url=self._url, kind=self._kind, session=self._session)
        result = source.read(self._clock())
        health = HealthProbe(self._url, self._session).status()
        if result.sample is None and health is None:
            raise EngineUnreachable(
                result.failure or "",
                f"no engine answers: {result.problem}; start it, or correct the address, which is "
                "that of its /metrics",
            )
        if result.problem is not None:
            unread[EvidencePart.EXPOSITION] = result.problem
        series = self._series()
        models, longest = self._models(unread)
        dialect = None if result.sample is None else DIALECTS[result.sample.dialect]
        evidence = EngineEvidence(
            url=shown_url(self._url),
            sample=result.sample,
            expected=frozenset() if dialect is None else expected_facts(dialect),
            cache_config=_labels(series.get(_CONFIG, ())),
            answered=_answered(series.get(_REQUESTS, ())),
            version=self._version(unread),
            models=models,
            max_model_len=longest,
            health=health,
            needs_key=self._needs_key(),
            date_lead_s=self._date_lead_s(),
            **{name: _histogram(series, short) for name, short in _HISTOGRAMS.items()},
        )
        return EngineRead(evidence, unread)

    def send(self, model: str) -> tuple[TrialRequest, str | None]:
        """Send one tiny request; also the id in its response, None without one."""
        request_id = f"goodput-agent-check-{secrets.token_hex(8)}"
        headers = {
            "X-Request-Id": request_id,
            "traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01",
            "Content-Type": "application/json",
        }
        body = {"model": model, "prompt": "Hello", "max_tokens": _TRIAL_TOKENS, "temperature": 0}
        sent_at = self._clock()
        problem: str | None = None
        response_id: str | None = None
        try:
            response = post(
                self._session,
                self._url + _TRIAL_PATH,
                json.dumps(body).encode(),
                headers,
                timeout_s=_TRIAL_WITHIN_S,
            )
            if response.ok:
                response_id = str(response.json()["id"])
            else:
                problem = status_text(response)
        except requests.Timeout:
            problem = f"no response within {_TRIAL_WITHIN_S:g} s"
        except requests.ConnectionError as error:
            problem = connection_problem(error)
        except (requests.RequestException, ValueError, LookupError, TypeError):
            problem = "its response is not that of an engine"
        trial = TrialRequest(
            request_id=request_id, sent_at=sent_at, ended_at=self._clock(), problem=problem
        )
        return trial, response_id

    def close(self) -> None:
        """Close its connections."""
        self._anonymous.close()
        self._session.close()

    def _series(self) -> Series:
        """vLLM's series by their names without a prefix, and those of its HTTP server."""
        short = {_CONFIG}
        for name in _HISTOGRAMS.values():
            short |= {f"{name}_bucket", f"{name}_sum"}
        names = {prefix + name: name for prefix in VLLM.prefixes for name in short}
        try:
            body = fetch(self._session, self._url + VLLM.metrics_path, timeout_s=_TIMEOUT_S)
            found = read_exposition(body, {*names, _REQUESTS}).series
        except ReadFailed:
            return {}
        return {names.get(name, name): values for name, values in found.items()}

    def _json(self, path: str) -> Any:
        return json.loads(fetch(self._session, self._url + path, timeout_s=_TIMEOUT_S))

    def _version(self, unread: dict[EvidencePart, str]) -> str | None:
        try:
            version = read_version(self._session, self._url, timeout_s=_TIMEOUT_S)
        except ReadFailed as error:
            unread[EvidencePart.VERSION] = f"{VERSION_PATH} {error.message}"
            return None
        if version is None:
            unread[EvidencePart.VERSION] = f"{VERSION_PATH} names none"
        return version

    def _models(self, unread: dict[EvidencePart, str]) -> tuple[tuple[str, ...], int | None]:
        """The names of the models, and the length of the first one."""
        try:
            listed = self._json(SERVED_PATH)["data"]
            length = listed[0].get("max_model_len")
            names = tuple(str(entry["id"]) for entry in listed)
        except ReadFailed as error:
            unread[EvidencePart.MODELS] = f"{SERVED_PATH} {error.message}"
            return (), None
        except (ValueError, LookupError, TypeError, AttributeError):
            unread[EvidencePart.MODELS] = f"{SERVED_PATH} has no list of models"
            return (), None
        return names, length if isinstance(length, int) else None

    def _needs_key(self) -> bool | None:
        status = status_of(self._anonymous, self._url + SERVED_PATH, timeout_s=_TIMEOUT_S)
        return {requests.codes.ok: False, 401: True, 403: True}.get(status or 0)

    def _date_lead_s(self) -> float | None:
        """How far the Date of a response, of whole seconds, lies outside its request's time."""
        before = self._clock()
        headers = headers_of(self._anonymous, self._url + "/health", timeout_s=_TIMEOUT_S)
        after = self._clock()
        try:
            dated = parsedate_to_datetime(headers["Date"]).timestamp()
        except (LookupError, ValueError, TypeError):
            return None
        return outside_s(dated, dated + 1.0, before, after)


def outside_s(first: float, last: float, from_s: float, until: float) -> float:
    """How far a time between `first` and `last` must be after (or, negative, before) a range."""
    if first > until:
        return first - until
    return min(0.0, last - from_s)


def _labels(series: Sequence[SeriesValue]) -> Mapping[str, str]:
    """The labels of an info series; those of the first rank."""
    return series[0].labels if series else {}


def _answered(series: Sequence[SeriesValue]) -> Mapping[str, float] | None:
    if not series:
        return None
    sums: defaultdict[str, float] = defaultdict(float)
    for each in series:
        if each.labels.get("handler") in _FOR_TEXT:
            sums[each.labels.get("status", "")] += each.value
    return dict(sums)


def _histogram(series: Series, name: str) -> HistogramSnapshot | None:
    buckets, sums = series.get(f"{name}_bucket", ()), series.get(f"{name}_sum", ())
    return merged_histogram(buckets, sums) if buckets else None
