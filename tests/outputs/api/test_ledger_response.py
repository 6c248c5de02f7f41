"""The ledger in the summary."""

from typing import Any

import pytest

from agent.records.minute import Ledger
from tests.outputs.api.serving import Api
from tests.outputs.api.test_efficiency_response import store_at_end, summary
from tests.records.minutes import UNKNOWN, minute


def closed(number: int, /, **given: Any) -> Any:
    """A closed minute with this ledger: 300 prompt tokens, 50 output tokens, 5 requests."""
    facts = {"input_tokens": 300.0, "output_tokens": 50.0, "requests": 5.0, "finished": 3.0}
    more = {name: given.pop(name) for name in ("engine", "ledger_closed") if name in given}
    priced = given.pop("priced", True)
    known = {"ledger": Ledger(**(facts | given)), "ledger_closed": True} | more
    return minute(number, **known) if priced else minute(number, **UNKNOWN, **known)


def side(input_tokens: float, output_tokens: float, requests: float) -> dict[str, float]:
    return {"input_tokens": input_tokens, "output_tokens": output_tokens, "requests": requests}


def test_closed_minutes_are_summed_and_open_ones_stand_apart(api: Api) -> None:
    rows = {"row_input_tokens": 100.0, "row_output_tokens": 20.0, "row_requests": 3.0}
    store_at_end(
        api,
        closed(0, **rows, row_finished=2.0, died=1.0, untold_rows=2.0),
        # A request at the edge of both minutes.
        closed(1, row_input_tokens=350.0, row_output_tokens=50.0, row_requests=6.0, finished=6.0),
        closed(2, ledger_closed=False, **rows),
    )
    ledger = summary(api)["ledger"]
    assert ledger["counted"] == side(600, 100, 10)
    assert ledger["unaccounted"] == side(150, 30, 1)
    assert ledger["unaccounted_requests"] == {"died": 1, "finished": 7, "aborted": 0}
    assert ledger["open"] == side(200, 30, 2)
    assert (ledger["unaccounted_usd"], ledger["untold_rows"]) == (pytest.approx(0.1), 2)


def test_what_one_engine_counts_too_little_hides_nothing_of_another(api: Api) -> None:
    store_at_end(api, closed(0), closed(0, engine="chat-1", row_input_tokens=900.0, priced=False))
    ledger = summary(api)["ledger"]
    assert ledger["unaccounted"]["input_tokens"] == 300
    assert summary(api, engine="chat-1")["ledger"]["unaccounted_usd"] is None


def test_what_no_engine_counts_is_unknown(api: Api) -> None:
    store_at_end(api, closed(0, requests=None, finished=None, output_tokens=None), minute(1))
    ledger = summary(api)["ledger"]
    assert ledger["unaccounted"] == {"input_tokens": 300, "output_tokens": None, "requests": None}
    assert ledger["unaccounted_requests"] == {}
    assert summary(api, tenant="acme")["ledger"] is None


def test_minutes_without_a_ledger_have_none(api: Api) -> None:
    store_at_end(api, minute(0), minute(1))
    assert summary(api)["ledger"] is None


def test_while_all_minutes_are_open_nothing_is_unaccounted(api: Api) -> None:
    store_at_end(api, closed(0, ledger_closed=False))
    ledger = summary(api)["ledger"]
    assert (ledger["counted_from"], ledger["counted"]) == (None, side(0, 0, 0))
    assert (ledger["unaccounted"], ledger["open"]) == (side(0, 0, 0), side(300, 50, 5))
