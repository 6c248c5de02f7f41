"""Sessions turn by turn over the API, from rows of each kind of database."""

from datetime import UTC, datetime
from typing import Any

import pytest

from agent.analysis import conversations
from agent.records.objective import Match, SessionLimits
from agent.records.request import ProxyView, RequestRecord, Status, Vantage
from tests.outputs.api.serving import Api
from tests.records.making import NOON, objective, record
from tests.records.minutes import minute

AGENTS = objective(
    "agents",
    session=SessionLimits(first_turn_ttft_s=1.0, turn_ttft_s=0.2, share_of_turns=0.5),
)


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


def turn(number: int, at: float, session: str | None, **given: Any) -> RequestRecord:
    """A turn of half a second that began at a time after NOON."""
    facts = {"vantage": Vantage.PROXY, "cached_tokens": 0, **given}
    return record(
        number,
        started_at=NOON + at,
        ended_at=NOON + at + 0.5,
        received_at=NOON + at + 0.6,
        proxied=ProxyView(session=session, streamed=True),
        **facts,
    )


SPOKEN = [
    turn(1, 0, "a", ttft_s=0.9, input_tokens=1000),
    turn(2, 5, "a", ttft_s=0.1, input_tokens=1200, cached_tokens=992),
    turn(3, 10, "a", ttft_s=0.8, input_tokens=1500, cached_tokens=0),
    turn(4, 12, "b", ttft_s=3.0, input_tokens=500),
    # No turns: the engine did not answer, and a request without a session.
    turn(5, 13, "b", status=Status.ERROR, ttft_s=None),
    turn(6, 14, None),
]


def asked(api: Api, path: str, **given: Any) -> dict[str, Any]:
    window = {"from": iso(NOON - 1), "until": iso(NOON + 60)}
    found: dict[str, Any] = api.query(path, **window, **given)
    return found


def test_turns_are_counted_and_their_figures_are_by_turn(api_of_each: Api) -> None:
    api_of_each.store(SPOKEN, [AGENTS])
    found = asked(api_of_each, "conversations")
    assert (found["sessions"], found["turns"], found["complete"]) == (2, 4, True)
    first, later = found["by_turn"]
    assert (first["bucket"], first["turns"], first["cached_ratio"]) == ("1", 2, 0.0)
    assert (later["bucket"], later["turns"]) == ("2-3", 2)
    assert later["cached_ratio"] == pytest.approx(992 / 2700)
    assert (later["evicted_tokens"], later["moved_tokens"]) == (1200, 0)
    assert later["gap_p50_s"] == pytest.approx(4.5, rel=0.006)
    # Without minutes of an engine nothing has a price.
    assert later["refilled_usd"] is None


def test_sessions_are_judged_by_the_limits_on_their_turns(api_of_each: Api) -> None:
    other = objective("acme", match=Match(tenant="acme"), session=AGENTS.session)
    api_of_each.set_objectives([AGENTS, objective("plain"), other])
    api_of_each.store(SPOKEN, [AGENTS])
    found = asked(api_of_each, "conversations")
    by_name = {each["objective"]: each for each in found["by_objective"]}
    assert by_name["agents"] == {
        "objective": "agents",
        "met": 1,
        "missed": 1,
        "undetermined": 0,
        "attainment": 0.5,
    }
    assert by_name["acme"]["attainment"] is None
    assert by_name.keys() == {"agents", "acme"}
    verdicts = {each["session"]: each["verdicts"] for each in found["items"]}
    assert verdicts == {"a": {"agents": "met"}, "b": {"agents": "missed"}}


def test_a_session_has_what_its_users_waited_for(api_of_each: Api) -> None:
    chat = objective("chat", ttft_s=0.7)
    api_of_each.store(SPOKEN, [chat])
    newest, worst = (
        asked(api_of_each, "conversations"),
        asked(api_of_each, "conversations", sort="worst"),
    )
    assert [each["session"] for each in newest["items"]] == ["b", "a"]
    one, other = worst["items"]
    assert (one["session"], one["missed_turns"], other["missed_turns"]) == ("a", 2, 1)
    assert (one["first_ttft_s"], one["later_ttft_p50_s"], one["worst_ttft_s"]) == (0.9, 0.1, 0.9)
    assert one["cached_ratio"] == pytest.approx(992 / 3700)
    assert one["gap_p50_s"] == pytest.approx(4.5)
    assert (other["later_ttft_p50_s"], other["gap_p50_s"], other["cached_ratio"]) == (None, None, 0)


def test_turns_that_nobody_judged_are_not_met(api: Api) -> None:
    api.store([turn(1, 0, "a", cached_tokens=None)], [])
    (one,) = asked(api, "conversations")["items"]
    assert (one["missed_turns"], one["cached_ratio"]) == (None, None)


def test_one_session_is_shown_turn_by_turn(api_of_each: Api) -> None:
    api_of_each.store(SPOKEN, [AGENTS])
    api_of_each.price(SPOKEN)
    found = asked(api_of_each, "conversation", session="a")
    assert [each["number"] for each in found["turns"]] == [1, 2, 3]
    assert [each["request_id"] for each in found["turns"]] == [f"request-{n}" for n in (1, 2, 3)]
    assert [each["gap_s"] for each in found["turns"]] == [None, 4.5, 4.5]
    assert [each["refilled_tokens"] for each in found["turns"]] == [None, 0, 1200]
    assert found["session"]["cost_usd"] == pytest.approx((1 + 2 + 3) / 8)
    assert found["session"]["worst_ttft_s"] == pytest.approx(0.9)
    assert found["session"]["engines"] == ["chat-0"]


def test_tokens_that_are_computed_again_have_the_price_of_computed_ones(api: Api) -> None:
    api.store(SPOKEN, [AGENTS])
    # 900 tokens were computed for 20 cents.
    api.store_minutes(minute(0))
    found = asked(api, "conversations")
    assert found["by_turn"][1]["refilled_usd"] == pytest.approx(1200 * 0.2 / 900)
    one = asked(api, "conversation", session="a")
    usd = [each["refilled_usd"] for each in one["turns"]]
    assert usd == [None, 0.0, pytest.approx(1200 * 0.2 / 900)]


def test_a_session_that_goes_on_in_the_window_is_numbered_from_its_begin(api: Api) -> None:
    api.store([turn(1, -600, "a"), turn(2, 5, "a"), turn(3, -900, "gone")], [AGENTS])
    found = asked(api, "conversations")
    assert [each["bucket"] for each in found["by_turn"]] == ["2-3"]
    assert [(each["session"], each["turns"]) for each in found["items"]] == [("a", 2)]


def test_of_more_turns_than_can_be_read_the_last_are_read_and_the_answer_says_so(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("agent.store.session_queries", "agent.outputs.api.conversation_routes"):
        monkeypatch.setattr(f"{module}.MOST_TURNS", 2)
    assert conversations.MOST_TURNS > 2
    api.store(SPOKEN, [AGENTS])
    found = asked(api, "conversations")
    assert (found["turns"], found["complete"]) == (2, False)


def test_filters_choose_turns_and_a_limit_leaves_sessions_out(api: Api) -> None:
    api.store([*SPOKEN, turn(7, 20, "c", engine="chat-1")], [AGENTS])
    assert asked(api, "conversations", engine="chat-1")["sessions"] == 1
    found = asked(api, "conversations", limit=1)
    assert [each["session"] for each in found["items"]] == ["c"]
    assert found["left_out"] == 2


def test_an_unknown_session_is_not_found(api: Api) -> None:
    status, sentence = api.refusal("conversation", session="nobody")
    assert status == 404
    assert sentence == "no turn of session 'nobody' began in this window"
