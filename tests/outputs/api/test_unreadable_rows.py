"""A row that cannot be read is left out and counted; every route has the figures of the others."""

from typing import Any

import pytest

from agent.records.event import Confidence, Event, EventKind
from agent.records.gpu import GpuSample
from agent.store.unreadable import UNREADABLE
from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import NOW
from tests.outputs.report.reported import figures, filled
from tests.records.minutes import minute

pytestmark = pytest.mark.slow

ROUTES = (
    *("summary", "timeseries", "objectives", "efficiency", "lengths", "requests", "events"),
    *("gpus", "agents", "breakdown?by=model", "breakdown?by=user", "summary?objective=chat"),
    *("requests?worst=ttft", "requests?objective=chat&verdict=met", "gpus/GPU-0"),
    *("requests?sort=cost", "scatter", "scatter?by=e2e", "beside?engine=chat-0"),
    "contrast?box_from=2000-01-01&box_until=2100-01-01&box_min_s=0.2",
)
OF_ALL_TIME = {"requests", "gpus", "agents"}
NAN, INFINITE = float("nan"), float("inf")
# A vector's head, and a number of 64 bits that is negative.
NEGATIVE = b"\x40\x00\x00" + (2**64 - 5).to_bytes(8, "little")


@pytest.fixture
def filled_api(api_of_each: Api) -> Api:
    filled(api_of_each)
    gpus = [GpuSample(gpu=f"GPU-{n}", index=n, name="H200", at=NOW - 9, facts={}) for n in range(2)]
    api_of_each.store_gpus(*gpus)
    api_of_each.store_minutes(minute(2))
    confidence = Confidence.CERTAIN
    for kind in (EventKind.HANG, EventKind.SLEEP):
        api_of_each.store_events(
            Event(at=NOW - 60, engine="chat-0", kind=kind, confidence=confidence, evidence={})
        )
    api_of_each.beat("agent-0", {"name": "chat-0"})
    api_of_each.beat("agent-1")
    return api_of_each


def answers(api: Api) -> dict[str, Any]:
    """The response of each route, which must have status 200, and a report."""
    found = {}
    for route in ROUTES:
        path, _, query = route.partition("?")
        asked = dict(each.split("=") for each in query.split("&") if each)
        window = {} if path in OF_ALL_TIME else {"window": "2h"}
        found[route] = api.query(path, **(window | asked))
    figures(api)
    return found


# Of several that no database treats otherwise, PostgreSQL has one.
@pytest.mark.parametrize(
    ("api_of_each", "damaged", "folded"),
    [
        ("sqlite", b"", False),
        ("sqlite", b"\x09\x00\x00garbage", True),
        ("sqlite", NEGATIVE, True),
        ("postgresql", NEGATIVE, True),
    ],
    ids=["empty change", "version of a rollup", "negative rollup", "negative rollup, postgresql"],
    indirect=["api_of_each"],
)
def test_sums_that_cannot_be_read_leave_the_sums_of_the_others(
    filled_api: Api, damaged: bytes, folded: bool
) -> None:
    if folded:
        filled_api.fold_and_expire()
    whole = filled_api.query("summary", window="2h")["requests"]
    table = "rollups" if folded else "rollup_changes"
    of_width = "width_s = 60" if folded else "id > 0"
    first = f"(SELECT max(starts_at) - 3600 FROM {table} WHERE {of_width})"
    filled_api.execute(
        f"UPDATE {table} SET counts = :damaged WHERE {of_width} AND starts_at < {first}",
        damaged=damaged,
    )
    left = answers(filled_api)["summary"]["requests"]
    assert 0 < left < whole
    assert UNREADABLE.count(table) > 0
    # Changes that cannot be folded do not keep the others from being folded.
    filled_api.fold_and_expire()
    assert filled_api.query("summary", window="2h")["requests"] == left


# By table: an order of its rows, and a column and its value for one row after the other.
ODD: dict[str, dict[str, tuple[str, list[tuple[str, Any]]]]] = {
    "sqlite": {
        "rollup_changes": ("id", [("judged_by", "[1")]),
        "requests": (
            "explanation IS NULL, ended_at DESC",
            [
                ("explanation", '{"shares": 5}'),
                ("verdicts", "{"),
                ("status", "odd"),
                ("cost_usd", INFINITE),
            ],
        ),
        "events": ("id", [("evidence", '{"a": 1e999}'), ("confidence", "odd")]),
        "gpu_samples": ("gpu DESC", [("mig_instances", "{}")]),
        "objectives": ("name DESC", [("definition", "{}")]),
        "agents": ("name DESC", [("engines", "[5]")]),
        "engine_minutes": (
            "starts_at",
            [("good_tokens_by_objective", "{"), ("busy_s", INFINITE)],
        ),
    },
    # Of several that no database treats otherwise, one. SQLite stores NULL for the others.
    "postgresql": {
        "requests": (
            "explanation IS NULL, ended_at DESC",
            [("status", "odd"), ("ttft_s", NAN)],
        ),
        "engine_minutes": ("starts_at", [("prefill_flops", NAN)]),
        "cause_rollups": ("excess_s", [("excess_s", NAN)]),
    },
}


@pytest.mark.parametrize(
    ("api_of_each", "kind"), [(kind, kind) for kind in ODD], ids=ODD, indirect=["api_of_each"]
)
def test_rows_with_odd_values_take_no_route_down(filled_api: Api, kind: str) -> None:
    if "cause_rollups" in ODD[kind]:
        filled_api.fold_and_expire()
    rows = filled_api.query("requests", limit="1000")["items"]
    row = "ctid" if kind == "postgresql" else "rowid"
    for table, (order, values) in ODD[kind].items():
        ordered = f"SELECT {row} FROM {table} ORDER BY {order}"
        damaged = [
            (column, value, filled_api.value(f"{ordered} LIMIT 1 OFFSET {number}"))
            for number, (column, value) in enumerate(values)
        ]
        for column, value, place in damaged:
            filled_api.execute(
                f"UPDATE {table} SET {column} = :value WHERE {row} = '{place}'", value=value
            )
    found = answers(filled_api)
    left = filled_api.query("requests", limit="1000")["items"]
    assert len(left) == len(rows) - len(ODD[kind]["requests"][1])
    assert found["summary"]["requests"] >= 500
    # At least the other minute and the other GPU are there.
    assert found["efficiency"]["items"]
    assert found["gpus"]["items"][0]["gpu"] == "GPU-0"


def test_a_text_that_is_not_utf8_takes_no_route_down(api: Api) -> None:
    filled(api)
    api.execute("UPDATE requests SET model = CAST(x'ff4142' AS text) WHERE id = 5")
    assert any(each["model"] == "\ufffdAB" for each in api.query("requests", limit="1000")["items"])
