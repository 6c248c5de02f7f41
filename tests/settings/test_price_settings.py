"""Prices in the settings file."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from agent.records.prices import PriceList
from agent.settings.price_settings import (
    ElectricitySettings,
    PriceSettings,
    date_text,
    price_list,
    unix_time,
)

NEW_YEAR = 1767225600.0


def rows(text: str) -> tuple[PriceSettings, ...]:
    return TypeAdapter(tuple[PriceSettings, ...]).validate_python(yaml.safe_load(text))


def prices_of(text: str, engines: Any = ()) -> PriceList:
    return price_list(rows(text), engines=engines)


def problem_of(text: str) -> str:
    with pytest.raises(ValidationError) as caught:
        rows(text)
    (only,) = caught.value.errors()
    return f"{'.'.join(map(str, only['loc']))}: {only['msg']}"


def test_an_old_price_holds_until_midnight_utc_of_the_date_of_the_new_one() -> None:
    prices = prices_of(
        "[{gpu: L4, gpu_hour_usd: 0.8, from: 2025-01-01, until: 2026-01-01},"
        " {gpu: L4, gpu_hour_usd: 0.7, from: 2026-01-01, until: null}]"
    )
    times = (0.0, NEW_YEAR - 1, NEW_YEAR)
    found = [prices.gpu_hour_usd("chat", "NVIDIA L4", at) for at in times]
    assert found == [None, 0.8, 0.7]


@pytest.mark.parametrize(
    "text",
    ["2026-01-01", '"2026-01-01"', "2026-01-01 00:00:00", '"2026-01-01T01:00:00+01:00"'],
)
def test_a_timestamp_is_a_date_or_a_date_with_a_time(text: str) -> None:
    assert unix_time(yaml.safe_load(text)) == NEW_YEAR


@given(st.datetimes().map(lambda at: at.replace(microsecond=0)))
def test_a_timestamp_is_shown_as_the_file_writes_it(at: object) -> None:
    assert unix_time(date_text(unix_time(at))) == unix_time(at)


def test_midnight_is_shown_as_a_date() -> None:
    assert date_text(NEW_YEAR) == "2026-01-01"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[{gpu: L4, gpu_hour_usd: -1.0}]", "0.gpu_hour_usd: Input should be greater"),
        ("[{gpu_hour_usd: 1.0}]", "0: Value error, set either gpu or engine"),
        ("[{gpu: L4, engine: a, gpu_hour_usd: 1.0}]", "0: Value error, set either gpu or engine"),
        ("[{gpu: L4, gpu_hour_usd: 1.0, until: 5}]", "0.until: Value error, 5 is not a date;"),
        (
            "[{gpu: L4, gpu_hour_usd: 1.0, from: 2026-01-02, until: 2026-01-02}]",
            "0: Value error, it ends on 2026-01-02, which is not after 2026-01-02",
        ),
    ],
)
def test_an_invalid_price_is_refused(text: str, expected: str) -> None:
    assert problem_of(text).startswith(expected)


@pytest.mark.parametrize(
    ("text", "engines", "expected"),
    [
        (
            "[{engine: chat, gpu_hour_usd: 1.0, until: 2026-01-01}]",
            [("batch", None), ("chat", 2.5)],
            "prices[0] and engines[1].gpu_hour_usd both price engine 'chat'",
        ),
        (
            "[{gpu: L4, gpu_hour_usd: 1.0, until: 2026-01-02},"
            " {gpu: NVIDIA L4, gpu_hour_usd: 1.0, from: 2026-01-01}]",
            [],
            "prices[0] and prices[1] both price gpu 'L4'",
        ),
    ],
)
def test_two_prices_of_one_thing_at_one_time_are_refused_with_both_keys(
    text: str, engines: Any, expected: str
) -> None:
    with pytest.raises(ValueError, match="at the same time") as caught:
        prices_of(text, engines)
    assert str(caught.value).startswith(expected)


def test_the_price_of_a_gpu_that_comes_in_several_forms_is_refused() -> None:
    with pytest.raises(ValueError, match="'H100' is no product; did you mean H100-SXM, H100-PCIe"):
        prices_of("[{gpu: H100, gpu_hour_usd: 3}]")
    # The table does not have all.
    assert prices_of("[{gpu: Tesla P4, gpu_hour_usd: 0.1}]")


def test_a_gpu_and_an_engine_of_one_name_have_separate_prices() -> None:
    prices = prices_of("[{gpu: L4, gpu_hour_usd: 1.0}, {engine: L4, gpu_hour_usd: 2.0}]")
    assert prices.gpu_hour_usd("chat", "L4", 0.0) == 1.0


def test_more_power_reaches_a_site_than_its_machines() -> None:
    with pytest.raises(ValidationError):
        ElectricitySettings(usd_per_kwh=0.2, pue=0.9)
