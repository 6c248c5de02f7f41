"""Bills, energy, figures of a window, and statements."""

from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.cost.bill import (
    Bill,
    BillParts,
    GroupSpending,
    bill,
    electricity_usd,
    energy_joules,
    spending,
    statement,
)
from agent.analysis.efficiency.request_activity import TimeRange
from agent.catalog.gpu_facts import ENERGY
from agent.records.gpu import GpuSample
from agent.records.minute import MinuteRow
from agent.records.prices import Electricity, Price, PriceList
from tests.records.minutes import UNKNOWN, minute

H100 = "NVIDIA H100 80GB HBM3"
HOUR = TimeRange(0.0, 3600.0)


def price(usd: float, setting: str = "prices[0]", **given: object) -> Price:
    return Price(setting=setting, gpu_hour_usd=usd, **given)  # type: ignore[arg-type]


def gpus_usd(
    *prices: Price, window: TimeRange = HOUR, gpus: tuple[str | None, ...] = (H100,)
) -> float | None:
    found = bill(PriceList(prices=prices), window, engine="chat-0", gpus=gpus)
    return None if found is None else found.gpus_usd


@pytest.mark.parametrize("name", ["H100-SXM", "h100-sxm", H100, "H100 80GB HBM3"])
def test_a_gpu_is_priced_by_its_name_in_nvml_or_in_the_table(name: str) -> None:
    assert gpus_usd(price(2.5, gpu=name)) == 2.5


_OF_H100 = price(2.5, gpu=H100)


@pytest.mark.parametrize(
    ("prices", "gpus", "usd"),
    [
        ([price(2.5, gpu="NVIDIA Z9")], ("Z9",), 2.5),
        ([_OF_H100, price(1.0, engine="chat-0")], (H100,), 1.0),
        ([price(1.0, engine="chat-1")], (H100,), None),
        ([price(1.0, engine="chat-0")], (None, None), 2.0),
        ([price(0.0, gpu=H100)], (H100,), 0.0),
        ([_OF_H100], (), None),
        ([_OF_H100], (None,), None),
        ([_OF_H100], (H100, "Tesla T4"), None),
    ],
    ids=[
        "not in the table", "the engine's wins", "another engine's", "no GPU names", "free",
        "no GPU", "unknown GPU", "one of two",
    ],
)  # fmt: skip
def test_every_gpu_needs_a_price_of_its_own_or_of_its_engine(
    prices: list[Price], gpus: tuple[str | None, ...], usd: float | None
) -> None:
    assert gpus_usd(*prices, gpus=gpus) == usd


@pytest.mark.parametrize(
    ("prices", "window", "usd"),
    [
        ([_OF_H100], TimeRange(10.0, 70.0), 2.5 / 60),
        # Each price counts for its time, from its start to before its end.
        (
            [price(2.0, gpu=H100, until=900.0), price(4.0, gpu=H100, from_at=900.0)],
            HOUR,
            2.0 / 4 + 4.0 * 3 / 4,
        ),
        ([price(2.0, gpu=H100, from_at=0.0, until=3600.0)], HOUR, 2.0),
        ([price(2.0, gpu=H100, from_at=0.0, until=3600.0)], TimeRange(3600.0, 3601.0), None),
        # A window with an unpriced part has no bill.
        ([price(2.0, gpu=H100, until=3599.0)], HOUR, None),
    ],
)
def test_a_price_counts_for_its_time(
    prices: list[Price], window: TimeRange, usd: float | None
) -> None:
    assert gpus_usd(*prices, window=window) == (usd and pytest.approx(usd))


def test_unmeasured_electricity_is_none_and_not_in_the_bill() -> None:
    # 700 W for an hour and 30 % more for cooling, at 20 cents.
    power = Electricity(usd_per_kwh=0.2, pue=1.3)
    assert electricity_usd(power, 700 * 3600) == pytest.approx(0.7 * 1.3 * 0.2)
    prices = PriceList(prices=(_OF_H100,), electricity=power)
    unmeasured = bill(prices, HOUR, engine="chat-0", gpus=(H100,))
    assert unmeasured == Bill(gpus_usd=2.5, electricity_usd=None)
    measured = bill(prices, HOUR, engine="chat-0", gpus=(H100,), joules=3.6e6)
    assert measured is not None
    assert measured.usd == pytest.approx(2.5 + 0.26)


MINUTE = TimeRange(0.0, 60.0)


def gpu_sample(gpu: str, at: float, joules: float | None) -> GpuSample:
    facts: dict[tuple[str, tuple[str, ...]], float] = {}
    if joules is not None:
        facts[ENERGY.name, ()] = joules
    return GpuSample(gpu=gpu, index=0, name="NVIDIA H100 80GB HBM3", at=at, facts=facts)


@pytest.mark.parametrize(
    ("samples", "gpus", "joules"),
    [
        # Interpolated between two samples.
        ([("a", -30, 0), ("a", 30, 600), ("a", 90, 1800)], ["a"], 900),
        # Reset.
        ([("a", 0, 5000), ("a", 30, 6000), ("a", 60, 400)], ["a"], 1400),
        # A sample without energy is skipped.
        ([("a", 0, 0), ("a", 30, None), ("a", 60, 900)], ["a"], 900),
        # The engine's GPUs add up, and others are left out.
        (
            [
                *(("a", 0, 100), ("b", 0, 0), ("c", 0, 0)),
                *(("a", 60, 20_100), ("b", 60, 7000), ("c", 60, 1000)),
            ],
            ["a", "b"],
            27_000,
        ),
        # Unknown unless every GPU has samples for the whole minute.
        ([], ["a"], None),
        ([("a", 0, 0), ("a", 59, 9)], ["a"], None),
        ([("a", 1, 0), ("a", 60, 9)], ["a"], None),
        ([("a", 0, None), ("a", 60, None)], ["a"], None),
        ([("a", 0, 0), ("a", 60, 9)], ["a", "b"], None),
        ([("a", 0, 0), ("a", 60, 9)], [], None),
    ],
)
def test_the_energy_of_a_minute(
    samples: list[tuple[str, float, float | None]], gpus: list[str], joules: float | None
) -> None:
    found = energy_joules([gpu_sample(*values) for values in samples], gpus, MINUTE)
    assert found == (joules and pytest.approx(joules))


@given(st.lists(st.floats(0, 1e9), min_size=2, max_size=8), st.floats(1, 59))
def test_the_energy_of_two_parts_is_the_energy_of_the_minute(
    counters: list[float], cut: float
) -> None:
    step = 60 / (len(counters) - 1)
    samples = [gpu_sample("a", place * step, joules) for place, joules in enumerate(counters[:-1])]
    samples.append(gpu_sample("a", 60.0, counters[-1]))
    parts = [
        energy_joules(samples, ["a"], window) for window in (TimeRange(0, cut), TimeRange(cut, 60))
    ]
    both = energy_joules(samples, ["a"], MINUTE)
    assert both is not None
    assert sum(part or 0.0 for part in parts) == pytest.approx(both, rel=1e-9, abs=1e-6)
    assert both >= 0


def test_unpriced_minutes_are_counted_and_the_others_have_their_cost() -> None:
    found = spending([minute(0), minute(1, **UNKNOWN), minute(2)])
    assert (found.bill_usd, found.priced_s, found.unpriced_s) == (2, 120, 60)
    assert found.ratios is not None
    assert found.ratios == spending([minute(0), minute(2)]).ratios
    # Of a dollar, 70 cents belong to the requests and 5 cents are unseen.
    assert found.ratios.overhead == pytest.approx(1 / 0.7)
    found = spending([minute(0, **UNKNOWN)])
    assert (found.cost, found.ratios, found.priced_s, found.unpriced_s) == (None, None, 0, 60)


def test_gpus_that_cost_nothing_have_a_price_and_a_bill_of_zero() -> None:
    free = {name: 0.0 for name in UNKNOWN if name.endswith("_usd")}
    found = spending([minute(0, **free)])
    assert found.ratios is not None
    assert (found.bill_usd, found.priced_s, found.unpriced_s) == (0, 60, 0)
    assert (found.ratios.per_request, found.ratios.per_million_output) == (0, 0)
    assert found.ratios.overhead is None


@pytest.mark.parametrize(
    ("minutes", "joules"),
    [
        # Rows have 200 of 300 tokens.
        ([minute(0, counted_output_tokens=300.0)], 20),
        ([minute(0, output_tokens=0.0, requests=0)], 30),
        ([minute(0), minute(1, joules=None)], 30),
        ([minute(0, joules=None)], None),
        ([minute(0, counted_output_tokens=0.0)], None),
    ],
)
def test_joules_per_token_are_of_all_tokens_that_the_engine_counted(
    minutes: list[MinuteRow], joules: float | None
) -> None:
    found = spending(minutes)
    assert found.joules_per_output_token == (joules and pytest.approx(joules))
    assert (found.joules is None) is any(each.joules is None for each in minutes)


# Cents of three requests, of unseen work and of idle time, which make a bill of 6 cents.
_INVOICE = {"acme": 0.01999, "globex": 0.01001, "initech": 0.01243}
_BILL = BillParts(
    bill_usd=0.06,
    rows_usd=0.04243,
    unaccounted_usd=0.00257,
    idle_usd=0.015,
    unread_usd=0.0,
    gpu_hours=1 / 60,
    unaccounted_requests=1.0,
    unaccounted_input_tokens=None,
    unaccounted_output_tokens=50.0,
)


def groups(**usd: float | None) -> list[GroupSpending]:
    return [
        GroupSpending(
            group=name,
            requests=1,
            input_tokens=1000.0,
            output_tokens=None,
            gpu_hours=0.005,
            cost_usd=cost,
        )
        for name, cost in usd.items()
    ]


def cents(by_group: list[GroupSpending], bill: BillParts = _BILL) -> dict[str, Decimal | None]:
    return {line.group or line.line: line.cost_usd for line in statement("tenant", by_group, bill)}


def test_tenants_unaccounted_work_and_idle_time_add_up_to_the_bill() -> None:
    found = cents(groups(**_INVOICE))
    bill = found.pop("bill")
    assert bill == Decimal("0.06")
    assert sum(usd or 0 for usd in found.values()) == bill
    assert found["acme"] == Decimal("0.01999")
    assert (found["unaccounted"], found["idle"]) == (Decimal("0.00257"), Decimal("0.015"))
    assert found["other requests"] == 0


def test_what_no_listed_tenant_cost_is_of_other_requests() -> None:
    found = cents(groups(acme=0.01999, globex=None))
    assert found["globex"] is None
    assert found["other requests"] == Decimal("0.02244")


def test_lines_add_up_as_they_are_printed() -> None:
    """Of a third of a cent each, one line is rounded up, so that no line is for rounding."""
    found = cents(
        groups(a=0.01 / 3, b=0.01 / 3, c=0.01 / 3), replace(_BILL, bill_usd=0.02757, rows_usd=0.01)
    )
    assert sorted(found[name] or 0 for name in "abc") == [
        Decimal("0.003333"), Decimal("0.003333"), Decimal("0.003334")
    ]  # fmt: skip
    assert sum(usd or 0 for name, usd in found.items() if name != "bill") == found["bill"]


def test_a_rest_below_a_millionth_has_no_sign() -> None:
    rest = cents(groups(acme=0.0424300001))["other requests"]
    assert str(rest) == "0.000000"


def test_requests_pay_their_part_in_the_window_and_no_line_is_negative() -> None:
    """Half of what they cost was before it."""
    twice = groups(acme=0.06, globex=0.02486)
    found = cents(twice)
    assert (found["acme"], found["globex"]) == (Decimal("0.03"), Decimal("0.01243"))
    assert found["other requests"] == 0
    lines = {line.group: line for line in statement("tenant", twice, _BILL)}
    assert lines["acme"].gpu_hours == pytest.approx(0.0025)


@given(
    st.lists(st.floats(min_value=0, max_value=1e4), max_size=30),
    st.lists(st.floats(min_value=0, max_value=1e4), min_size=4, max_size=4),
)
def test_any_statement_adds_up_to_the_bill_without_negative_lines(
    costs: list[float], parts: list[float]
) -> None:
    rows, unaccounted, idle, unread = parts
    usd = {"rows_usd": rows, "unaccounted_usd": unaccounted, "idle_usd": idle, "unread_usd": unread}
    bill = replace(_BILL, bill_usd=sum(parts), **usd)
    by_group = groups(**{f"t{number}": cost for number, cost in enumerate(costs)})
    *lines, whole = statement("tenant", by_group, bill)
    paid = [line.cost_usd for line in lines if line.cost_usd is not None]
    assert sum(paid) == whole.cost_usd
    assert min(paid) >= 0


def test_without_a_price_there_are_only_the_groups() -> None:
    lines = statement("tenant", groups(acme=None), None)
    assert [(line.line, line.group, line.cost_usd) for line in lines] == [("tenant", "acme", None)]
