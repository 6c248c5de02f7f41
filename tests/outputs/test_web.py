"""The first page: it shows text as text, asks only this agent, and says when it is a simulation."""

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
    """The elements of a page and the addresses in them."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element has."""
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


def test_no_text_is_ever_made_into_markup(elements: Elements) -> None:
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser"
    assert not re.search(ways, first_page())
    assert elements.handlers == []


def test_the_page_loads_and_asks_nothing_from_anywhere_else(elements: Elements) -> None:
    assert all(address.startswith("/") for address in elements.addresses)
    assert "//" not in re.sub(r"^\s*//.*$", "", first_page(), flags=re.MULTILINE)


def test_the_script_writes_only_into_elements_that_are_there(elements: Elements) -> None:
    assert len(set(elements.ids)) == len(elements.ids)
    assert set(re.findall(r'byId\("(\w+)"\)', first_page())) <= set(elements.ids)


def test_the_label_of_a_simulation_is_hidden_until_the_agent_says_so() -> None:
    assert re.search(r'<p id="simulated" hidden>SIMULATED: .* not from a real engine', first_page())


def test_everything_that_the_page_asks_for_is_answered(elements: Elements, tmp_path: Path) -> None:
    asked = {*re.findall(r'ask\("([^"]+)"\)', first_page()), *elements.addresses}
    assert len(asked) > 3
    with open_api(tmp_path) as api:
        for path in asked:
            assert api.answer(path).status_code == 200, path


def fill(api: Api) -> None:
    """One request with hostile names, one of which nothing is known."""
    ended_at = api.around.now - 1
    hostile = record(1, model=HOSTILE, engine=HOSTILE, ended_at=ended_at)
    unseen = dict.fromkeys(("ttft_s", "tpot_s", "e2e_s", "queue_s", "input_tokens", "model"))
    api.store([hostile, record(2, ended_at=ended_at, **unseen)], [objective()])
    api.around.engines.append(
        {"name": HOSTILE, "up": False, "model": HOSTILE, "dialect": None, "read_at": None}
    )


def test_a_browser_shows_hostile_names_as_text_and_unknown_figures_as_a_dash(
    tmp_path: Path,
) -> None:
    with open_api(tmp_path) as api:
        fill(api)
        page = dump_dom(f"{api.url}/")
    body = page.partition("<script>")[0]
    # As markup of its own, once for each place that shows a name; no element came of it.
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
    """What the page shows under each name."""
    return dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", page))


def shown_beside(tmp_path: Path, *windows: MinuteRow) -> dict[str, str]:
    """What the page shows of the use and cost of GPUs that had these windows."""
    with open_api(tmp_path) as api:
        api.keep_minutes(*windows)
        page = dump_dom(f"{api.url}/").partition("<script>")[0]
    for broken in ("NaN", "undefined", "null", "[object"):
        assert broken not in page
    prices = (f"Cost per 1M {kind} tokens" for kind in ("input", "output"))
    names = ("MFU", "MBU", "Verdict", "Cost per hour", *prices)
    return {name: figures(page)[name] for name in names}


def test_a_browser_shows_how_well_the_gpus_were_used_and_what_they_cost(tmp_path: Path) -> None:
    assert shown_beside(tmp_path, minute(2), minute(3, output_tokens=2e6, gpus_usd=99)) == {
        "MFU": "11.8 %",
        "MBU": "29.1 %",
        "Verdict": "bandwidth-bound",
        "Cost per hour": "$3,003",
        "Cost per 1M input tokens": "$300",
        # Dimes for each of millions of tokens: not rounded to nothing.
        "Cost per 1M output tokens": "$0.4",
    }


def test_a_browser_shows_where_sources_disagree_and_why(tmp_path: Path) -> None:
    found = {"figure": "mfu", "higher": "hardware", "lower": "requests", "times": 2.5}
    told = found | {"cause": "preemptions", "causes": ["requests were computed again", "another"]}
    with open_api(tmp_path) as api:
        api.keep_minutes(minute(3, disagreements=(told, {**told, "times": None, "lower": "x<b>"})))
        page = dump_dom(f"{api.url}/")
    over = "MFU by hardware over that by"
    why = "Likely: requests were computed again."
    assert f"<li>{over} requests: 2.5 times. {why}</li>" in page
    assert f"<li>{over} x&lt;b&gt;: infinite, as that is 0. {why}</li>" in page


def test_a_browser_shows_a_dash_where_model_and_price_are_not_known(tmp_path: Path) -> None:
    known = shown_beside(tmp_path, minute(3, **UNKNOWN))
    assert set(known.values()) == {"\N{EN DASH}"}


def test_a_browser_says_when_the_figures_are_old(tmp_path: Path) -> None:
    with open_api(tmp_path, migrated=False) as api:
        page = dump_dom(f"{api.url}/")
    assert re.search(r'<p id="problem">These figures are old: \S+ answered 503</p>', page)
