"""When pages on error budgets fired, over real rollups."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.records.request import RequestRecord
from tests.outputs.api.serving import Api, open_api
from tests.outputs.api.traffic import unix
from tests.records.making import objective, record

PROMISED = objective("chat", target=0.99)


def traffic(end: float, model: str, missed: range, first: int = 0) -> list[RequestRecord]:
    """Ten requests in each of the last 60 minutes; those of some minutes miss."""
    return [
        record(
            first + 10 * minute + n,
            model=model,
            engine=f"of-{model}",
            ttft_s=9.0 if minute in missed else 0.1,
            ended_at=end - 3600 + 60 * minute + n,
        )
        for minute in range(60)
        for n in range(10)
    ]


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with open_api(tmp_path) as running:
        running.agent.now = running.agent.now // 60 * 60 + 30.0
        running.set_objectives([PROMISED])
        end = running.agent.now // 60 * 60
        rows = [*traffic(end, "llama", range(30, 40)), *traffic(end, "qwen", range(0), 1000)]
        running.store(rows, [PROMISED])
        yield running


Fired = list[tuple[str, str, int | None, int | None]]
# 6 % of all requests so far after two minutes, 14.4 % after six; an alert waits for two minutes.
FIRED: Fired = [("slow burn", "llama", 34, 38), ("fast burn", "llama", 38, 45)]


def minutes(api: Api, **asked: str) -> Fired:
    """Rule, model, and begin and end in minutes of the hour of the requests."""
    hour = api.agent.now // 60 * 60 - 3600

    def minute(at: str | None) -> int | None:
        return None if at is None else round((unix(at) - hour) / 60)

    return [
        (each["rule"], each["model"], minute(each["fired_from"]), minute(each["fired_until"]))
        for each in api.query("alerts", **asked)["items"]
    ]


def test_pages_are_those_of_the_rendered_rules_for_each_model(api: Api) -> None:
    assert minutes(api, window="1h") == FIRED
    (slow, _) = api.query("alerts", window="1h")["items"]
    assert (slow["alert"], slow["objective"]) == ("LlmObjectiveBudgetBurn", "chat")
    api.fold_and_expire()
    assert minutes(api, window="1h") == FIRED


def test_a_window_has_what_fired_in_it(api: Api) -> None:
    hour = api.agent.now // 60 * 60 - 3600
    between = {"from": str(hour + 40 * 60), "until": str(hour + 42 * 60)}
    assert minutes(api, **between) == [("fast burn", "llama", None, None)]
    assert minutes(api, window="10m") == []


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"model": "llama"}, FIRED),
        ({"model": "qwen"}, []),
        ({"engine": "of-llama"}, FIRED),
        ({"engine": "of-qwen"}, []),
        ({"objective": "batch"}, []),
    ],
)
def test_pages_are_those_on_models_of_the_chosen_requests(
    api: Api, asked: dict[str, str], expected: Fired
) -> None:
    assert minutes(api, window="1h", **asked) == expected


def test_pages_are_known_as_long_as_minutes_are_kept(api: Api) -> None:
    now = api.agent.now
    hour = api.query("alerts", window="1h")
    assert unix(hour["known_from"]) == now - 3600
    week = api.query("alerts", window="7d")
    # 46 hours less the longest window of a page, 6 hours.
    assert unix(week["known_from"]) == pytest.approx(now - 40 * 3600, abs=200)
    assert [each["rule"] for each in week["items"]] == ["slow burn", "fast burn"]
    old = api.query("alerts", **{"from": "now-6d", "until": "now-5d"})
    assert old["items"] == []
