"""The view of cost in a browser: what the bill is for, and tenants with their budgets."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.outputs.api.serving import Api, open_api
from tests.real_parts.chromium import Opened, at, faults, opened_in
from tests.records.making import objective, record
from tests.records.minutes import minute


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Two priced requests of acme and one of globex, of one priced minute."""
    with open_api(tmp_path_factory.mktemp("cost")) as running:
        ended_at = running.agent.now - 1
        rows = [
            record(1, tenant="acme", ended_at=ended_at),
            record(2, tenant="acme", ended_at=ended_at),
            record(3, tenant="globex", ended_at=ended_at),
        ]
        running.store(rows, [objective()])
        running.price(rows)
        running.store_minutes(minute(2), minute(3))
        running.agent.tenant_budgets |= {"acme": 1.0}
        yield running


@pytest.fixture(scope="module")
def there(browser: Browser, api: Api) -> Iterator[Opened]:
    with opened_in(browser, api.url) as page:
        yield page


def test_the_bill_is_told_by_what_it_paid_for(there: Opened, api: Api) -> None:
    at(there, api.url, "cost")
    cost = api.query("summary", window="1h")["cost"]
    table = there.page.get_by_role("region", name="The bill, last hour")
    shown = dict(
        (row.locator("th").inner_text(), row.locator("td").all_inner_texts())
        for row in table.get_by_role("row").all()[1:]
    )
    aborted_decode = cost["aborted_usd"] - cost["aborted_prefill_usd"]
    parts = {
        "decode": cost["decode_usd"] - aborted_decode,
        "prefill": cost["prefill_usd"] - cost["aborted_prefill_usd"],
        "aborted requests": cost["aborted_usd"],
        "work of unseen requests": cost["unseen_usd"],
        "idle": cost["idle_usd"],
        "engine not read": cost["unknown_usd"],
    }
    assert sum(parts.values()) == pytest.approx(cost["bill_usd"])
    for name, usd in (parts | {"the bill": cost["bill_usd"]}).items():
        text = f"${usd:,.2f}" if usd >= 1 else f"${usd:.3g}"
        assert shown[name][0] == text, name
    there.page.get_by_text("Where the money goes by minute, last hour").wait_for()


def test_a_tenant_is_compared_with_its_budget(there: Opened, api: Api) -> None:
    at(there, api.url, "cost")
    rows = {
        name: there.page.get_by_role("row").filter(has_text=name).locator("td").all_inner_texts()
        for name in ("acme", "globex")
    }
    found = api.query("breakdown", by="tenant", cost="true", window="1h")["groups"]
    budget = next(each["budget"] for each in found if each["group"] == "acme")
    assert rows["acme"][3] == f"${budget['forecast_usd_per_month']:,.2f}"
    assert rows["acme"][4] == "$1.00"
    assert "over budget" in rows["acme"][5]
    assert rows["globex"][4:6] == ["none", ""]


def test_everybody_can_use_the_view(there: Opened, api: Api) -> None:
    assert faults(there, api.url, "cost") == []
