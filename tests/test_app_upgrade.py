"""The running agent on the database of the first agent that called itself 0.1.0."""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from agent.store.migrating import newest_revision
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.ports import free_port
from tests.real_parts.span_sender import SpanSender, request_span
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.slow

DUMP = Path(__file__).parent / "data" / "upgrade" / "first-0.1.0.sql"
# Of rows of any age.
KEPT = {"keep_requests": "36500d", "keep_rollups": "36500d"}
WINDOW = "36000d"
WITHIN_S = 60.0

COLUMNS = (
    *("trace_id", "span_id", "request_id", "engine", "model", "vantage", "status", "verdict"),
    *("ttft_s", "tpot_s", "e2e_s", "queue_s", "prefill_s", "decode_s"),
    *("input_tokens", "output_tokens"),
)

Row = dict[str, Any]


@dataclass
class Upgraded:
    """The agent, its database, and the rows that were there before."""

    agent: AgentProcess
    sender: SpanSender
    file: Path
    before: dict[str, Row]


def rows_of(file: Path) -> dict[str, Row]:
    """The rows of a database by trace id, read without the agent."""
    with closing(sqlite3.connect(file)) as database:
        found = database.execute(f"SELECT {', '.join(COLUMNS)} FROM requests")
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in found]
    return {row["trace_id"]: row for row in rows}


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upgraded]:
    folder, ports = tmp_path_factory.mktemp("upgraded"), AgentPorts.free()
    file = folder / "goodput.db"
    with closing(sqlite3.connect(file)) as database:
        database.executescript(DUMP.read_text(encoding="utf-8"))
    before = rows_of(file)
    settings = {
        "name": "agent-0",
        "engines": [{"name": "simulator", "url": f"http://127.0.0.1:{free_port()}"}],
        "storage": KEPT,
    }
    with AgentProcess.with_settings(folder, ports, settings) as agent:
        yield Upgraded(agent, SpanSender(ports.grpc), file, before)


def test_the_database_is_at_the_newest_revision(upgraded: Upgraded) -> None:
    with closing(sqlite3.connect(upgraded.file)) as database:
        (revision,) = database.execute("SELECT version_num FROM alembic_version").fetchone()
    assert revision == newest_revision()
    assert "from revision 0002 to" in upgraded.agent.log()
    assert requests.get(f"{upgraded.agent.url}/readyz", timeout=30).status_code == 200


def test_every_row_is_there_with_its_values(upgraded: Upgraded) -> None:
    assert len(upgraded.before) > 30
    shown = {row["trace_id"]: row for row in upgraded.agent.api.requests(limit="1000")}
    for trace_id, row in upgraded.before.items():
        assert {name: shown[trace_id][name] for name in COLUMNS} == row
    assert rows_of(upgraded.file).items() >= upgraded.before.items()


def test_figures_are_those_of_the_rows(upgraded: Upgraded) -> None:
    summary = upgraded.agent.api.summary(window=WINDOW)
    rows = upgraded.before.values()
    verdicts = Counter(row["verdict"] for row in rows)
    assert summary["requests"] == len(rows)
    assert [summary[name] for name in ("met", "missed")] == [verdicts["met"], verdicts["missed"]]
    for measure in ("ttft", "e2e"):
        values = [1000 * row[f"{measure}_s"] for row in rows]
        median = np.quantile(values, 0.5, method="inverted_cdf")
        assert summary[f"{measure}_ms"]["p50"] == pytest.approx(median, rel=0.006)


def test_new_requests_join_the_old_ones(upgraded: Upgraded) -> None:
    eventually(
        lambda: upgraded.sender.export([request_span("new")]),
        within_s=WITHIN_S,
        what="an acknowledged span",
    )
    assert upgraded.agent.api.request("new")
    counted = upgraded.agent.api.summary(window=WINDOW)["requests"]
    assert counted == len(upgraded.before) + 1
