"""Bills: price x time x GPUs, with prices that change over time."""

import pytest

from agent.analysis.cost.bill import Bill, bill, electricity_usd, gpu_hours
from agent.analysis.efficiency.time_range import TimeRange
from agent.records.prices import Electricity, Price, PriceList

H100 = "NVIDIA H100 80GB HBM3"
HOUR = TimeRange(0.0, 3600.0)


def price(usd: float, setting: str = "prices[0]", **given: object) -> Price:
    return Price(setting=setting, gpu_hour_usd=usd, **given)  # type: ignore[arg-type]


def gpus_usd(
    *prices: Price, window: TimeRange = HOUR, gpus: tuple[str | None, ...] = (H100,)
) -> float | None:
    found = bill(PriceList(prices=prices), window, engine="chat-0", gpus=gpus)
    return None if found is None else found.gpus_usd


def test_every_gpu_costs_its_price_for_the_whole_minute() -> None:
    minute = TimeRange(10.0, 70.0)
    assert gpus_usd(price(3.0, gpu=H100), window=minute, gpus=(H100,) * 4) == pytest.approx(0.2)


@pytest.mark.parametrize("name", ["H100-SXM", "h100-sxm", H100, "H100 80GB HBM3"])
def test_a_gpu_is_priced_by_its_name_in_nvml_or_in_the_table(name: str) -> None:
    assert gpus_usd(price(2.5, gpu=name)) == 2.5


def test_a_gpu_missing_in_the_table_is_priced_by_its_nvml_name() -> None:
    assert gpus_usd(price(2.5, gpu="NVIDIA Z9"), gpus=("Z9",)) == 2.5


def test_the_price_of_the_engine_wins() -> None:
    assert gpus_usd(price(2.5, gpu=H100), price(1.0, engine="chat-0")) == 1.0


def test_the_price_of_another_engine_is_ignored() -> None:
    assert gpus_usd(price(1.0, engine="chat-1")) is None


def test_the_price_of_an_engine_needs_no_gpu_names() -> None:
    assert gpus_usd(price(1.0, engine="chat-0"), gpus=(None, None)) == 2.0


@pytest.mark.parametrize("gpus", [(), (None,), (H100, "Tesla T4")])
def test_without_a_price_for_every_gpu_there_is_no_bill(gpus: tuple[str | None, ...]) -> None:
    assert gpus_usd(price(2.5, gpu=H100), gpus=gpus) is None


def test_a_price_of_zero_is_a_price() -> None:
    assert gpus_usd(price(0.0, gpu=H100)) == 0.0


def test_a_minute_with_a_price_change_uses_each_price_for_its_time() -> None:
    before, after = price(2.0, gpu=H100, until=900.0), price(4.0, gpu=H100, from_at=900.0)
    assert gpus_usd(before, after) == pytest.approx(2.0 / 4 + 4.0 * 3 / 4)


def test_a_window_with_an_unpriced_part_has_no_bill() -> None:
    assert gpus_usd(price(2.0, gpu=H100, until=3599.0)) is None


def test_a_price_includes_its_start_and_excludes_its_end() -> None:
    day = price(2.0, gpu=H100, from_at=0.0, until=3600.0)
    assert gpus_usd(day) == 2.0
    assert gpus_usd(day, window=TimeRange(3600.0, 3601.0)) is None


def test_electricity_includes_the_pue() -> None:
    # 700 W for an hour and 30 % more for cooling, at 20 cents.
    power = Electricity(usd_per_kwh=0.2, pue=1.3)
    assert electricity_usd(power, 700 * 3600) == pytest.approx(0.7 * 1.3 * 0.2)


def test_unmeasured_electricity_is_none_and_not_in_the_bill() -> None:
    prices = PriceList(prices=(price(2.0, gpu=H100),), electricity=Electricity(usd_per_kwh=0.2))
    unmeasured = bill(prices, HOUR, engine="chat-0", gpus=(H100,))
    assert unmeasured == Bill(gpus_usd=2.0, electricity_usd=None)
    measured = bill(prices, HOUR, engine="chat-0", gpus=(H100,), joules=3.6e6)
    assert measured is not None
    assert measured.usd == pytest.approx(2.2)


def test_gpu_hours_need_no_price() -> None:
    assert gpu_hours(8, TimeRange(0.0, 1800.0)) == 4.0


def test_two_prices_of_one_gpu_at_once_are_an_error_that_names_both() -> None:
    by_nvml = price(1.0, "prices[0]", gpu=H100)
    by_table = price(2.0, "prices[1]", gpu="H100-SXM", from_at=5.0)
    with pytest.raises(ValueError, match=r"prices\[0\] and prices\[1\] both price gpu 'H100-SXM'"):
        PriceList(prices=(by_nvml, by_table))
