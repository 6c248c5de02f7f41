"""The API has the same responses from ClickHouse as from the file that was published to it.

The engine is ClickHouse's own, from chDB; the HTTP in front of it is of the tests.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple, get_args

import pytest

from agent.records.queries import Dimension
from tests.outputs.api.serving import Api, open_api_at
from tests.real_parts.clickhouse import ClickHouseServer
from tests.store.clickhouse.filled import BASE, OBJECTIVES, fill
from tests.store.publishing.published import file_in, publishing


class Both(NamedTuple):
    """The API over the agent's file, and over ClickHouse."""

    own: Api
    shared: Api


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory, clickhouse_server: ClickHouseServer
) -> Iterator[Both]:
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("answers")
        file = stack.enter_context(file_in(folder))
        url = stack.enter_context(clickhouse_server.new_database())
        own = stack.enter_context(open_api_at(f"sqlite:///{file.url.database}"))
        fill(file, own)
        with publishing(file, url, objectives=OBJECTIVES):
            pass
        shared = stack.enter_context(open_api_at(url))
        own.agent.now = shared.agent.now = BASE + 333.75
        yield Both(own, shared)


@pytest.mark.parametrize("window", ["5m", "3h", "2d", "30d"])
@pytest.mark.parametrize(
    "selection",
    [{}, {"engine": "chat-0"}, {"model": "qwen"}, {"tenant": "o'neil %s"}, {"objective": "tokens"}],
)
def test_summaries(both: Both, window: str, selection: dict[str, str]) -> None:
    same(both, "summary", window=window, **selection)


def same(both: Both, path: str, **parameters: Any) -> Any:
    own, shared = (api.query(path, **parameters) for api in both)
    assert shared == own
    return shared


@pytest.mark.parametrize(
    ("window", "step"), [("30m", "10s"), ("3h", "1m"), ("2d", "1h"), ("10d", "1d")]
)
def test_timeseries(both: Both, window: str, step: str) -> None:
    for objective in ({}, {"objective": "chat"}):
        same(both, "timeseries", window=window, step=step, **objective)


@pytest.mark.parametrize("by", get_args(Dimension))
def test_breakdowns(both: Both, by: str) -> None:
    for window in ("3h", "3d"):
        for more in ({}, {"cost": "true", "histograms": "true"}, {"objective": "tokens"}):
            groups = same(both, "breakdown", by=by, window=window, **more)["groups"]
            assert groups


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"status": "timeout"},
        {"verdict": "missed"},
        {"objective": "tokens", "verdict": "missed"},
        {"objective": "tokens"},
        {"cause": "burst"},
        {"user": "ann"},
        {"workload": "batch", "priority": "1"},
        {"tenant": "o'neil %s"},
        {"min_ttft_ms": 150, "max_input_tokens": 9000},
        {"worst": "e2e", "limit": 20},
        {"worst": "ttft", "engine": "chat-1", "limit": 20},
    ],
)
def test_requests(both: Both, chosen: dict[str, str]) -> None:
    # A cursor has the number of a row, which each database gives.
    own, shared = (api.query("requests", **chosen) | {"next": None} for api in both)
    assert shared == own
    assert own["items"]


@pytest.mark.parametrize("path", ["requests", "events", "gpus/GPU-1"])
def test_pages(both: Both, path: str) -> None:
    """The moments of some events are those of others, so a page may end between these."""
    own, shared = ([*api.pages(path, limit=7)] for api in both)
    assert shared == own
    assert len(own) > 1


def test_one_request(both: Both) -> None:
    for name in ("request-7", "request-1003", "chatcmpl-1001-0"):
        same(both, f"requests/{name}")
    assert [api.refusal("requests/nobody")[0] for api in both] == [404, 404]


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("events", {"engine": "chat-1"}),
        ("events", {"kind": "RESTART", "confidence": "certain"}),
        ("efficiency", {"window": "1h"}),
        ("efficiency", {"window": "1h", "engine": "chat-0"}),
        ("lengths", {"window": "1d"}),
        ("lengths", {"window": "1d", "objective": "tokens"}),
        ("gpus", {}),
        ("engines", {}),
    ],
)
def test_everything_else(both: Both, path: str, parameters: dict[str, str]) -> None:
    same(both, path, **parameters)


def test_objectives(both: Both) -> None:
    """An objective is in force from the time when it was written to each database."""
    own, shared = (api.query("objectives")["items"] for api in both)
    assert [item | {"in_force_from": None} for item in shared] == [
        item | {"in_force_from": None} for item in own
    ]
    assert [item["name"] for item in shared] == ["chat", "tokens"]


def test_agents(both: Both) -> None:
    """Each agent reports to each database at another time."""
    (own,), (shared,) = (api.query("agents")["items"] for api in both)
    assert shared.keys() == own.keys()
    assert (shared["name"], shared["version"]) == (own["name"], own["version"])
    assert (shared["waiting_rows"], shared["overdue"]) == (0, False)
    assert shared["silent_s"] >= 0
