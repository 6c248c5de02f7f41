"""The first page: it escapes text, queries only this agent and labels a simulation."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from agent.outputs.web import first_page
from agent.records.minute import MinuteRow
from tests.outputs.api.serving import Api, open_api
from tests.real_parts.chromium import dump_dom
from tests.records.making import objective, record
from tests.records.minutes import UNKNOWN, minute

HOSTILE = "<img src=x onerror=\"document.body.append('owned')\">"


class Elements(HTMLParser):
    """The ids, addresses and event handlers of the elements of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the attributes of an element."""
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "action"):
                self.addresses.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)


@pytest.fixture(scope="module")
def elements() -> Elements:
    parsed = Elements()
    parsed.feed(first_page())
    return parsed


def test_the_script_writes_no_markup(elements: Elements) -> None:
    writers = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser"
    )
    assert not re.search(writers, first_page())
    assert elements.handlers == []


def test_the_page_loads_and_queries_only_this_agent(elements: Elements) -> None:
    assert all(address.startswith("/") for address in elements.addresses)
    assert "//" not in re.sub(r"^\s*//.*$", "", first_page(), flags=re.MULTILINE)


def test_the_script_writes_only_into_existing_elements(elements: Elements) -> None:
    assert len(set(elements.ids)) == len(elements.ids)
    assert set(re.findall(r'byId\("(\w+)"\)', first_page())) <= set(elements.ids)


def test_the_label_of_a_simulation_is_hidden_at_first() -> None:
    assert re.search(r'<p id="simulated" hidden>SIMULATED: .* not from a real engine', first_page())


def test_every_query_of_the_page_has_a_response(elements: Elements, tmp_path: Path) -> None:
    paths = {*re.findall(r'ask\("([^"]+)"\)', first_page()), *elements.addresses}
    assert len(paths) > 3
    with open_api(tmp_path) as api:
        for path in paths:
            assert api.get(path).status_code == 200, path


def fill(api: Api) -> None:
    """Store one request with hostile names and one with unknown values."""
    ended_at = api.agent.now - 1
    hostile = record(1, model=HOSTILE, engine=HOSTILE, ended_at=ended_at)
    unseen = dict.fromkeys(("ttft_s", "tpot_s", "e2e_s", "queue_s", "input_tokens", "model"))
    api.store([hostile, record(2, ended_at=ended_at, **unseen)], [objective()])
    api.agent.engines.append(
        {"name": HOSTILE, "up": False, "model": HOSTILE, "dialect": None, "read_at": None}
    )


def test_a_browser_shows_hostile_names_as_text_and_unknown_values_as_a_dash(
    tmp_path: Path,
) -> None:
    with open_api(tmp_path) as api:
        fill(api)
        page = dump_dom(f"{api.url}/")
    body = page.partition("<script>")[0]
    # Escaped in each of the four places that show a name.
    assert body.count("&lt;img src=x onerror=") == 4
    assert "<img" not in body
    assert not body.rstrip().endswith("owned")
    assert '<td class="met">met</td>' in body
    assert '<td class="undetermined">undetermined</td>' in body
    assert "<td>\N{EN DASH}</td>" in body
    for broken in ("NaN", "undefined", ">null<", "[object"):
        assert broken not in body
    assert '<p id="simulated">SIMULATED' in body


def figures(page: str) -> dict[str, str]:
    """Return the value that the page shows for each name."""
    return dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", page))


def shown_efficiency(tmp_path: Path, *rows: MinuteRow) -> dict[str, str]:
    """Return the efficiency and cost that the page shows for these minutes."""
    with open_api(tmp_path) as api:
        api.store_minutes(*rows)
        page = dump_dom(f"{api.url}/").partition("<script>")[0]
    for broken in ("NaN", "undefined", "null", "[object"):
        assert broken not in page
    prices = (f"Cost per 1M {kind} tokens" for kind in ("input", "output"))
    names = ("MFU", "MBU", "Verdict", "Cost per hour", *prices)
    return {name: figures(page)[name] for name in names}


def test_a_browser_shows_the_efficiency_and_cost_of_gpus(tmp_path: Path) -> None:
    assert shown_efficiency(tmp_path, minute(2), minute(3, output_tokens=2e6, gpus_usd=99)) == {
        "MFU": "11.8 %",
        "MBU": "29.1 %",
        "Verdict": "bandwidth-bound",
        "Cost per hour": "$3,003",
        "Cost per 1M input tokens": "$300",
        # A price below a dollar is not rounded to nothing.
        "Cost per 1M output tokens": "$0.4",
    }


def test_a_browser_shows_disagreements_with_their_causes(tmp_path: Path) -> None:
    pair = {"figure": "mfu", "higher": "hardware", "lower": "requests", "times": 2.5}
    disagreement = pair | {
        "cause": "preemptions",
        "causes": ["requests were computed again", "another"],
    }
    with open_api(tmp_path) as api:
        api.store_minutes(
            minute(
                3, disagreements=(disagreement, {**disagreement, "times": None, "lower": "x<b>"})
            )
        )
        page = dump_dom(f"{api.url}/")
    over = "MFU by hardware over that by"
    why = "Likely: requests were computed again."
    assert f"<li>{over} requests: 2.5 times. {why}</li>" in page
    assert f"<li>{over} x&lt;b&gt;: infinite, as that is 0. {why}</li>" in page


def test_a_browser_shows_a_dash_for_an_unknown_model_and_price(tmp_path: Path) -> None:
    shown = shown_efficiency(tmp_path, minute(3, **UNKNOWN))
    assert set(shown.values()) == {"\N{EN DASH}"}


def test_a_browser_says_that_the_figures_are_old(tmp_path: Path) -> None:
    with open_api(tmp_path, migrated=False) as api:
        page = dump_dom(f"{api.url}/")
    assert re.search(r'<p id="problem">These figures are old: \S+ answered 503</p>', page)
