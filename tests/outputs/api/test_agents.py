"""The list of agents, on each kind of database."""

from tests.outputs.api.serving import Api

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
