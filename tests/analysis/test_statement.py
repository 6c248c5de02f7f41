"""Statements: the invoice of docs/cost.md, whose seconds and cents are known by hand."""

from dataclasses import replace
from decimal import Decimal

from agent.analysis.cost.bill import BillParts, GroupSpending, statement

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
    assert found["other requests"] == found["rounding"] == 0


def test_what_no_listed_tenant_cost_is_of_other_requests() -> None:
    found = cents(groups(acme=0.01999, globex=None))
    assert found["globex"] is None
    assert found["other requests"] == Decimal("0.02244")


def test_lines_add_up_as_they_are_printed() -> None:
    """Of a third of a cent each, rounding takes a part of every line."""
    found = cents(
        groups(a=0.01 / 3, b=0.01 / 3, c=0.01 / 3),
        replace(_BILL, bill_usd=0.02757, rows_usd=0.01),
    )
    assert found["rounding"] == Decimal("0.000001")
    assert sum(usd or 0 for name, usd in found.items() if name != "bill") == found["bill"]


def test_without_a_price_there_are_only_the_groups() -> None:
    lines = statement("tenant", groups(acme=None), None)
    assert [(line.line, line.group, line.cost_usd) for line in lines] == [("tenant", "acme", None)]
