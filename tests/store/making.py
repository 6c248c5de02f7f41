"""Judged requests made by number, and what a database holds of them."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, select

from agent.analysis.quantiles import bin_of
from agent.analysis.tally import MEASURES
from agent.catalog.definitions import Verdict
from agent.records.gpu import GpuSample
from agent.records.objective import JudgedRequest, Judgement
from agent.records.request import RequestRecord, Status, Vantage
from agent.store.questions import Questions
from agent.store.tables import requests, rollups
from agent.store.writing import RequestWriter, request_write

# A whole number of minutes.
NOON = 1_790_000_040 // 60 * 60

# Nothing here takes a second; a test that waits this long has failed.
WITHIN_S = 60.0

Key = tuple[str, str]


def judgement(verdict: Verdict = Verdict.MET, **by_objective: Verdict) -> Judgement:
    """A judgement; without objectives it is one objective's, of the same verdict."""
    return Judgement(verdict, tuple(by_objective.items()) or (("chat", verdict),))


MET = judgement()


def request(number: int, judged: Judgement = MET, **given: Any) -> JudgedRequest:
    """The request of that number, which took a second; whatever is given is put in its place."""
    facts: dict[str, Any] = {
        "trace_id": f"{number:032x}",
        "span_id": f"{number:016x}",
        "vantage": Vantage.ENGINE,
        "status": Status.OK,
        "started_at": NOON + 0.25,
        "ended_at": NOON + 1.25,
        "received_at": NOON + 1.5,
        "request_id": f"request-{number}",
        "agent": "agent-0",
        "engine": "chat-0",
        "model": "llama",
    }
    return JudgedRequest(RequestRecord(**(facts | given)), judged)


def some(numbers: Iterable[int], **given: Any) -> list[JudgedRequest]:
    """The requests of these numbers."""
    return [request(number, **given) for number in numbers]


def gpu_sample(at: float, gpu: str = "GPU-1", **given: Any) -> GpuSample:
    """A reading of a GPU that told nothing; whatever is given is put in its place."""
    facts: dict[str, Any] = {"index": 0, "name": "NVIDIA H200", "facts": {}}
    return GpuSample(gpu=gpu, at=at, **(facts | given))


def key_of(item: JudgedRequest) -> Key:
    """What identifies a request."""
    return (item.record.trace_id, item.record.span_id)


def keys_of(judged: Iterable[JudgedRequest]) -> list[Key]:
    """What identifies each of these."""
    return sorted(key_of(item) for item in judged)


def store(engine: Engine, judged: Sequence[JudgedRequest]) -> list[JudgedRequest]:
    """Commit these at once; the answer is which were new."""
    return request_write(engine)(judged).new


@contextmanager
def open_writer(engine: Engine) -> Iterator[RequestWriter]:
    """A writer on this database, closed on the way out."""
    writer = RequestWriter(request_write(engine))
    try:
        yield writer
    finally:
        writer.close()


def stored_keys(engine: Engine) -> list[Key]:
    """What identifies each row in the database."""
    with engine.connect() as connection:
        rows = connection.execute(select(requests.c.trace_id, requests.c.span_id))
        return sorted((trace_id, span_id) for trace_id, span_id in rows)


def only_row(engine: Engine) -> Mapping[str, Any]:
    """The one row of the database, by the name of the column, as the store answers it."""
    (row,) = Questions(engine).request("request-1")
    return row


def rollup_texts(engine: Engine) -> dict[tuple[Any, ...], str]:
    """The text of each stored rollup by its key."""
    with engine.connect() as connection:
        return {tuple(row[:-1]): row.tally for row in connection.execute(select(rollups))}


def counted_rollups(engine: Engine) -> dict[tuple[Any, ...], Any]:
    """What is told by each stored rollup, by its key."""
    return {key: json.loads(text) for key, text in rollup_texts(engine).items()}


def counted_rows(engine: Engine) -> dict[tuple[Any, ...], Any]:
    """What the rollups should tell, counted from the stored rows one by one."""
    counted: dict[tuple[Any, ...], Any] = {}
    with engine.connect() as connection:
        for row in connection.execute(select(requests).where(requests.c.counted)).mappings():
            facts = {str(name): value for name, value in row.items()}
            for width_s in (10, 60):
                told = counted.setdefault(_rollup_key(facts, width_s), _nothing())
                _count(told, facts)
    for told in counted.values():
        _write_as_stored(told)
    return counted


def _rollup_key(row: Mapping[str, Any], width_s: int) -> tuple[Any, ...]:
    return (
        width_s,
        int(row["ended_at"] // width_s) * width_s,
        *(row[name] or "" for name in ("agent", "engine", "model", "tenant")),
        ",".join(json.loads(row["verdicts"])),
    )


def _nothing() -> dict[str, Any]:
    return {
        "requests": 0,
        "statuses": {},
        "seen_at_proxy": 0,
        "input_tokens": [0, 0],
        "output_tokens": [0, 0],
        "verdicts": {},
        "bins": {},
    }


def _count(told: dict[str, Any], row: Mapping[str, Any]) -> None:
    told["requests"] += 1
    told["statuses"][row["status"]] = told["statuses"].get(row["status"], 0) + 1
    told["seen_at_proxy"] += row["vantage"] != "engine"
    for name in ("input_tokens", "output_tokens"):
        told[name][0] += row[name] or 0
        told[name][1] += row[name] is not None
    for pair in {"": row["verdict"], **json.loads(row["verdicts"])}.items():
        counts = told["verdicts"].setdefault(pair, [0, 0])
        counts[0] += 1
        counts[1] += row["output_tokens"] or 0
    for measure in MEASURES:
        if row[measure] is not None:
            bins = told["bins"].setdefault(measure, {})
            index = bin_of(row[measure])
            bins[index] = bins.get(index, 0) + 1


def _write_as_stored(told: dict[str, Any]) -> None:
    told["verdicts"] = sorted([*pair, *counts] for pair, counts in told["verdicts"].items())
    told["bins"] = {
        measure: [
            min(bins),
            [bins.get(index, 0) for index in range(min(bins), max(bins) + 1)],
        ]
        for measure, bins in told["bins"].items()
    }
