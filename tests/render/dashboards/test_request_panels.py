"""The dashboard of requests on the real PostgreSQL, as a role that may only read."""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import Engine

from agent.analysis.conversations import TurnRequest, conversations_of, figures_by_turn
from agent.analysis.quantiles import RELATIVE_ERROR
from agent.analysis.verdicts import Judge
from agent.catalog.causes import Cause
from agent.catalog.definitions import Verdict
from agent.records.event import Confidence, Event, EventKind
from agent.records.objective import JudgedRequest
from agent.records.request import EngineView, ProxyView, Status, Vantage
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from agent.store.objectives import ObjectiveStore
from agent.store.observations import ObservationStore
from agent.store.transactions import Joining, request_write
from tests.real_parts.postgres import PostgresServer
from tests.render.alerts.cases import OBJECTIVES
from tests.render.dashboards.reading import Asked, clicked, dashboards, on_postgres
from tests.store.explaining import explain, explained, share
from tests.store.making import NOON, judgement, publish, request, store


def written_out(
    statement: str, chosen: Mapping[str, Sequence[str]], shown: tuple[float, float], every_s: int
) -> str:
    """The statement for these values of variables, the time shown and the step of a graph."""
    start, end = (datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") for at in shown)

    def quoted(found: re.Match[str]) -> str:
        return ",".join("'" + value.replace("'", "''") + "'" for value in chosen[found[1]])

    def grouped(found: re.Match[str]) -> str:
        return f'floor(extract(epoch from {found[1]})/{every_s})*{every_s} AS "time"'

    statement = re.sub(r"\$\{(\w+):sqlstring\}", quoted, statement)
    statement = re.sub(r"\$__timeFilter\((\w+)\)", rf"\1 BETWEEN '{start}' AND '{end}'", statement)
    return re.sub(r"\$__timeGroupAlias\((\w+), \$__interval\)", grouped, statement)


(DASHBOARD,) = (item for item in dashboards() if item["uid"] == "goodput-requests")
ASKED = {question.name: question for question in on_postgres(DASHBOARD)}
VARIABLES = {
    variable["name"]: variable["query"]
    for variable in DASHBOARD["templating"]["list"]
    if variable["type"] == "query"
}
READER = "grafana_reader"
KV, BURST = Cause.KV_PRESSURE, Cause.BURST

TOLD: dict[str, Any] = {
    "ttft_s": 0.2, "tpot_s": 0.02, "e2e_s": 1.0, "queue_s": 0.05, "prefill_s": 0.15,
    "decode_s": 0.8, "input_tokens": 900, "output_tokens": 40, "tenant": "acme",
    "cached_tokens": 450,
}  # fmt: skip
MISSED = judgement(Verdict.MISSED, chat=Verdict.MISSED, answers=Verdict.MET)
MET = judgement(Verdict.MET, chat=Verdict.MET)


def some_requests() -> list[JudgedRequest]:
    slow = {"ttft_s": 3.0, "queue_s": 2.5, "e2e_s": 4.0, "input_tokens": 5_000}
    joined = {
        "vantage": Vantage.JOINED,
        "proxied": ProxyView(first_byte_s=0.1, response_id="resp_4", session="alone"),
        "proxy_span_id": "f" * 16,
        "engine_view": EngineView("chatcmpl-4-0", Status.OK, holdback_s=0.01),
    }
    failed = {"status": Status.ERROR, "tenant": "o'neill", "ttft_s": None}
    return [
        request(1, MET, **TOLD),
        request(2, MISSED, **TOLD | slow),
        request(3, MISSED, **TOLD | failed),
        request(4, MET, **TOLD | {"output_tokens": 70} | joined),
        request(5, judgement(Verdict.UNDETERMINED, chat=Verdict.UNDETERMINED), engine=None),
        request(6, judgement(Verdict.MET, answers=Verdict.MET), **TOLD),
        request(7, MET, **TOLD | {"started_at": NOON - 7200}),
        *spoken(),
    ]


def spoken() -> list[JudgedRequest]:
    """A long session of a tenant of its own, and a short one beside it; some tokens are unknown."""
    seeded = random.Random(3)
    return [
        request(
            100 + number,
            MET,
            **TOLD
            | {
                "vantage": Vantage.PROXY,
                "tenant": "talker",
                "proxied": ProxyView(session="long" if number % 4 else "short"),
                "started_at": NOON + 10 * number,
                "ended_at": NOON + 10 * number + seeded.uniform(1, 12),
                "ttft_s": seeded.choice((None, seeded.random())),
                "input_tokens": 100 * number + 50 if number % 5 else None,
                "cached_tokens": seeded.choice((None, 0, 100 * number)),
            },
        )
        for number in range(30)
    ]


def store_all(engine: Engine) -> None:
    """The requests, two causes of a miss and one of another objective, and events."""
    store(engine, some_requests())
    shares = (share(KV, 2.1), share(BURST, 0.7), share(BURST, 9.0, objective="answers"))
    explain(engine, explained(some_requests()[1], *shares))
    # A view that waits for the other one of its request is not counted yet.
    joining = Joining(judge=Judge(OBJECTIVES), wait_s=60.0)
    waiting = request(8, MISSED, **TOLD | {"vantage": Vantage.PROXY, "e2e_s": 99.0})
    request_write(engine, joining)([waiting])
    # Events of a chosen engine, of one without requests, and of a GPU.
    hang = partial(Event, kind=EventKind.HANG, confidence=Confidence.PROBABLE)
    fault = partial(Event, kind=EventKind.GPU_FAULT, confidence=Confidence.CERTAIN)
    for event in (
        hang(at=NOON, engine="chat-0", evidence={"stuck_s": 12.5}),
        hang(at=NOON + 1, engine="chat-9"),
        fault(at=NOON + 2, engine=None, gpu="GPU-a"),
    ):
        ObservationStore(engine, "agent-0").write_event(event)


Reader = psycopg.Connection[dict[str, Any]]


@pytest.fixture(scope="module")
def reader(postgres_server: PostgresServer) -> Iterator[Reader]:
    with postgres_server.new_database() as url:
        engine = open_engine(url)
        upgrade(engine)
        publish(engine, store_all)
        ObjectiveStore(engine, "agent-0").write_in_force(OBJECTIVES, NOON)
        engine.dispose()
        plain = url.replace("+psycopg", "")
        with psycopg.connect(plain, autocommit=True) as owner:
            owner.execute(f"CREATE ROLE {READER} LOGIN".encode())
            owner.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {READER}".encode())
            with psycopg.connect(
                plain.replace("postgres@", f"{READER}@"), row_factory=dict_row
            ) as it:
                it.read_only = True
                yield it
            owner.execute(f"DROP OWNED BY {READER}".encode())
            owner.execute(f"DROP ROLE {READER}".encode())


Rows = list[dict[str, Any]]
CHOSEN = {
    "objective": ["chat"],
    "engine": ["chat-0", "unknown"],
    "model": ["llama"],
    "tenant": ["acme", "o'neill", "unknown"],
    "worst_by": ["e2e"],
    "request": ["request-4"],
    "tempo_datasource": ["tempo"],
    "jaeger_datasource": [""],
}


def answer(reader: Reader, statement: str, **chosen: Sequence[str]) -> Rows:
    values: Mapping[str, Sequence[str]] = {**CHOSEN, **chosen}
    plain = written_out(statement, values, (NOON - 600, NOON + 600), 60)
    rows = reader.execute(plain.encode()).fetchall()
    reader.rollback()
    return rows


def panel(name: str) -> str:
    return ASKED[name].expression


@pytest.mark.parametrize("question", ASKED.values(), ids=ASKED)
def test_every_panel_returns_rows(reader: Reader, question: Asked) -> None:
    rows = answer(reader, question.expression)
    assert rows
    # A column that a panel formats must be one that its first question gets.
    formatted = {
        override["matcher"]["options"]
        for override in question.panel["fieldConfig"]["overrides"]
        if override["matcher"]["id"] == "byName"
    }
    if question.target["refId"] == "A":
        assert formatted <= set(rows[0]), formatted - set(rows[0])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("objective", ["answers", "chat", "strict"]),
        ("engine", ["chat-0", "chat-9", "unknown"]),
        ("model", ["llama"]),
        ("tenant", ["acme", "o'neill", "talker", "unknown"]),
    ],
)
def test_a_variable_offers_the_stored_values(reader: Reader, name: str, values: list[str]) -> None:
    rows = answer(reader, VARIABLES[name])
    assert sorted(next(iter(row.values())) for row in rows) == values


@pytest.mark.parametrize(("by", "worst"), [("e2e", "request-2"), ("max gap", "request-6")])
def test_the_worst_comes_first(reader: Reader, by: str, worst: str) -> None:
    rows = answer(reader, panel("Worst requests"), worst_by=[by])
    assert rows[0]["request"] == worst
    assert len(rows) == 6


def test_the_cached_share_of_a_tenant_is_that_of_its_prompts(reader: Reader) -> None:
    (row,) = answer(reader, panel("Prompts from the cache by tenant"), tenant=["acme"])
    own = [
        item.record
        for item in some_requests()
        if item.record.tenant == "acme"
        and "chat" in dict(item.judgement.by_objective)
        and item.record.started_at >= NOON
    ]
    prompts = sum(record.input_tokens or 0 for record in own)
    assert (row["requests"], row["input"]) == (len(own), prompts)
    assert row["cached"] == pytest.approx(450 * len(own) / prompts)


def test_conversations_by_turn_are_those_of_the_api(reader: Reader) -> None:
    turns = [turn for one in conversations_of(map(turn_request, spoken())) for turn in one.turns]
    figures = figures_by_turn(turns)
    rows = answer(reader, panel("Conversations by turn"), tenant=["talker"])
    assert [(row["turn"], row["turns"]) for row in rows] == [
        (each.bucket, each.turns) for each in figures
    ]
    for row, each in zip(rows, figures, strict=True):
        assert row["TTFT p50"] == near(each.ttft_p50_s)
        assert row["TTFT p95"] == near(each.ttft_p95_s)
        assert row["cached"] == (each.cached_ratio and pytest.approx(each.cached_ratio))
        assert (row["gap p50"] and float(row["gap p50"])) == near(each.gap_p50_s)
        assert row["computed again"] in (each.evicted_tokens or None, each.evicted_tokens)
    assert sum(row["computed again"] or 0 for row in rows) > 0


def near(value: float | None) -> Any:
    return None if value is None else pytest.approx(value, rel=2 * RELATIVE_ERROR)


def turn_request(item: JudgedRequest) -> TurnRequest:
    record, view = item.record, item.record.proxied
    assert view is not None
    assert view.session is not None
    names = set(TurnRequest._fields) - {"session", "verdict"}
    facts = {name: getattr(record, name) for name in names}
    return TurnRequest(session=view.session, verdict=item.judgement.verdict, **facts)


def test_without_values_to_choose_a_panel_is_empty_without_an_error(reader: Reader) -> None:
    nothing: Mapping[str, Sequence[str]] = {"engine": (), "model": (), "tenant": ()}
    for question in ASKED.values():
        answer(reader, question.expression, **nothing)
    assert answer(reader, panel("Worst requests"), **nothing) == []
    assert len(answer(reader, marked(), **nothing)) == 1


# Where a click leads


def link(title: str, column: str, name: str) -> str:
    for override in ASKED[title].panel["fieldConfig"]["overrides"]:
        if override["matcher"]["options"] == column:
            properties = {item["id"]: item["value"] for item in override["properties"]}
            (url,) = (item["url"] for item in properties["links"] if item["title"] == name)
    return str(url)


both = pytest.mark.parametrize("title", ["Worst requests", "The request and its trace"])


@both
@pytest.mark.parametrize(
    ("tempo", "jaeger", "source", "query_type"),
    [("t", "", "t", "traceql"), ("", "j", "j", ""), ("t", "j", "t", "traceql")],
    ids=["tempo", "jaeger", "both"],
)
def test_a_link_on_a_trace_opens_it_in_the_configured_store(
    reader: Reader, title: str, tempo: str, jaeger: str, source: str, query_type: str
) -> None:
    stores = {"tempo_datasource": [tempo], "jaeger_datasource": [jaeger]}
    rows = answer(reader, panel(title), **stores)
    row = next(row for row in rows if row["request"] == "request-4")
    url = urlsplit(clicked(link(title, "trace", "The trace"), row, "trace", {}))
    assert url.path == "/explore"
    shown = json.loads(parse_qs(url.query)["panes"][0])["trace"]
    (query,) = shown["queries"]
    assert (shown["datasource"], query["datasource"]) == (source, {"uid": source})
    assert (query["query"], query["queryType"]) == (f"{4:032x}", query_type)
    began_ms = row["began"].timestamp() * 1000
    assert float(shown["range"]["from"]) < began_ms < float(shown["range"]["to"])


@both
def test_a_link_on_an_engine_opens_the_minutes_around_the_request(
    reader: Reader, title: str
) -> None:
    """Not the time shown, in which the request may be a point or not be at all."""
    row = answer(reader, panel(title), request=["request-2"], worst_by=["e2e"])[0]
    assert row["request"] == "request-2"
    url = urlsplit(clicked(link(title, "engine", "The engine at that time"), row, "engine", {}))
    parameters = {name: value for name, (value,) in parse_qs(url.query).items()}
    assert (url.path, parameters["var-engine"]) == ("/d/goodput-operations", "chat-0")
    began_ms = row["began"].timestamp() * 1000
    assert began_ms - float(parameters["from"]) == pytest.approx(300_000, abs=2)
    assert float(parameters["to"]) - began_ms == pytest.approx(304_000, abs=2)


# Events


def marked() -> str:
    (mark,) = (mark for mark in DASHBOARD["annotations"]["list"] if "target" in mark)
    return str(mark["target"]["rawSql"])


def test_events_of_the_chosen_engines_and_of_gpus_are_marked(reader: Reader) -> None:
    rows = answer(reader, marked())
    assert [(row["time"].timestamp(), row["title"], row["tags"]) for row in rows] == [
        (NOON, "HANG on chat-0", "HANG,probable,chat-0"),
        (NOON + 2, "GPU_FAULT on GPU-a", "GPU_FAULT,certain,GPU-a"),
    ]
    assert json.loads(rows[0]["text"]) == {"stuck_s": 12.5}


# Figures


def test_the_colours_of_attainment_use_the_objective_in_force(reader: Reader) -> None:
    (question,) = {question.expression for name, question in ASKED.items() if name.endswith("/ B")}
    for promised in OBJECTIVES:
        (row,) = answer(reader, question, objective=[promised.name])
        assert row == {"unknown": -1, "below": 0, "target": promised.target}


def test_attainment_is_by_input_and_output_length(reader: Reader) -> None:
    rows = {
        row["input"]: row for row in answer(reader, panel("Attainment by input and output length"))
    }
    assert set(rows) == {"0-1k", "4k-16k"}
    assert (rows["0-1k"]["judged"], rows["4k-16k"]["judged"]) == (3, 1)
    assert (rows["0-1k"]["out 0-64"], rows["0-1k"]["out 64-256"]) == (0.5, 1.0)
    assert (rows["4k-16k"]["out 0-64"], rows["4k-16k"]["out 4k+"]) == (0.0, None)


def test_misses_are_grouped_by_cause_and_tenant_and_times_by_phase(reader: Reader) -> None:
    rows = answer(reader, panel("Causes of misses"))
    assert [(row["cause"], row["missed"], row["excess"]) for row in rows] == [
        ("kv_pressure", 1, 2.1),
        ("burst", 1, 0.7),
        ("error", 1, None),
    ]
    assert [row["share"] for row in rows] == [pytest.approx(0.75), pytest.approx(0.25), None]
    rows = answer(reader, panel("Attainment by tenant"))
    tenants = [(row["tenant"], row["judged"], row["attainment"]) for row in rows]
    assert tenants == [("o'neill", 1, 0.0), ("acme", 3, pytest.approx(2 / 3)), ("unknown", 0, None)]
    rows = answer(reader, panel("Time by phase and verdict"))
    by_verdict = {row["verdict"]: row for row in rows}
    assert by_verdict["met"]["decode"] == pytest.approx(0.8)
    assert by_verdict["missed"]["queue"] > by_verdict["met"]["queue"]


def test_one_request_is_found_by_any_of_its_ids_or_its_trace(reader: Reader) -> None:
    by_id = answer(reader, panel("Phases of the request"))
    assert [row["phase"] for row in by_id] == ["front", "queue", "prefill", "decode", "in all"]
    for other in ("resp_4", "chatcmpl-4-0", f"{4:032x}"):
        assert answer(reader, panel("Phases of the request"), request=[other]) == by_id
    figures = {
        row["figure"]: row["value"]
        for row in answer(reader, panel("Everything known of the request"))
    }
    assert (figures["holdback_s"], figures["tenant"]) == ("0.01", "acme")
    assert "cause" not in figures
    # Also before the time shown; input of a user stays a quoted value.
    assert answer(reader, panel("Phases of the request"), request=["request-7"])
    assert answer(reader, panel("Phases of the request"), request=["' OR true --"]) == []
