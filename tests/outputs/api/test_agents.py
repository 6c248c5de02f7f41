"""The list of agents, on each kind of database."""

import pytest

from agent.records.event import Confidence, Event, EventKind
from tests.outputs.api.serving import Api
from tests.records.making import objective, record
from tests.records.minutes import minute

_AGENTS = ("agent-0", "agent-1")
KEYS = {
    *("name", "version", "simulated", "started_at", "last_seen_at", "silent_s", "stopped_at"),
    *("overdue", "waiting_rows", "lag_s"),
}


def test_agents_are_listed_by_name_with_their_age_by_the_clock_of_the_database(
    api_of_each: Api,
) -> None:
    """The clock of the API stands at another time."""
    assert api_of_each.query("agents") == {"items": [], "next": None}
    api_of_each.beat("code", {"name": "code-0", "up": True})
    api_of_each.beat("chat")
    items = api_of_each.query("agents")["items"]
    assert [item["name"] for item in items] == ["chat", "code"]
    for item in items:
        assert item.keys() == KEYS
        assert 0 <= item["silent_s"] < 3600
        assert item["last_seen_at"] is not None
        # No value of these is made up.
        assert (item["stopped_at"], item["lag_s"], item["waiting_rows"]) == (None, None, None)


@pytest.fixture
def two(api_of_each: Api) -> Api:
    """Requests, a minute, an event and an objective of each of two agents, with the same names."""
    api, now = api_of_each, api_of_each.agent.now
    chat = objective(ttft_s=0.2)
    of_each = {"agent-0": (1, 2, 3), "agent-1": (4,)}
    for agent, numbers in of_each.items():
        # The data of agent-1 begins later.
        begun = now - 200 / numbers[0]
        ended = [record(n, agent=agent, ended_at=begun + n) for n in numbers[:-1]]
        api.store([*ended, record(numbers[-1], agent=agent, ttft_s=9.0, ended_at=begun)], [chat])
        api.store_minutes(minute(3), agent=agent)
        api.store_events(
            Event(at=now, engine="chat-0", kind=EventKind.RESTART, confidence=Confidence.CERTAIN),
            agent=agent,
        )
        api.set_objectives([chat], agent=agent)
    return api


def test_the_figures_of_two_agents_are_summed_and_told_apart(two: Api) -> None:
    requests = {"agent-0": 3, "agent-1": 1}
    both = two.query("summary")
    assert (both["requests"], both["met"], both["missed"]) == (4, 2, 2)
    for agent, count in requests.items():
        own = two.query("summary", agent=agent)
        assert (own["requests"], own["missed"]) == (count, 1)
        assert len(two.query("requests", agent=agent)["items"]) == count
        steps = two.query("timeseries", window="10m", agent=agent)["items"]
        assert sum(step["requests"] for step in steps) == count
        assert [e["agent"] for e in two.query("events", agent=agent)["items"]] == [agent]
        (only,) = two.query("objectives", agent=agent)["items"]
        assert (only["agent"], only["requests"]) == (agent, count)
    assert two.query("summary", agent="agent-9")["requests"] == 0
    groups = {each["group"]: each for each in two.query("breakdown", by="agent")["groups"]}
    assert {agent: group["requests"] for agent, group in groups.items()} == requests


def test_objectives_of_many_agents_cost_no_more_queries_than_those_of_two(two: Api) -> None:
    with two.counted_statements() as of_two:
        two.query("objectives")
    for number in range(2, 30):
        two.set_objectives([objective(ttft_s=0.2)], agent=f"agent-{number}")
    with two.counted_statements() as of_thirty:
        found = two.query("objectives")["items"]
    assert [item["requests"] for item in found] == [4] * 30
    assert len(of_thirty) == len(of_two)


def test_rates_of_an_agent_are_over_the_time_that_it_has_data_of(two: Api) -> None:
    covered = {agent: two.query("summary", agent=agent)["covered_s"] for agent in _AGENTS}
    assert covered["agent-1"] < covered["agent-0"] == two.query("summary")["covered_s"]
    groups = {each["group"]: each for each in two.query("breakdown", by="agent")["groups"]}
    for agent, seconds in covered.items():
        rate = groups[agent]["throughput_rps"]
        assert rate == pytest.approx(groups[agent]["requests"] / seconds)


def test_the_cost_of_two_agents_is_the_sum_of_theirs(two: Api) -> None:
    both = two.query("summary")["cost"]["bill_usd"]
    each = [two.query("summary", agent=agent)["cost"]["bill_usd"] for agent in _AGENTS]
    assert min(each) > 0
    assert both == pytest.approx(sum(each))
