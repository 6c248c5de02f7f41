"""A report as text, Markdown, HTML and JSON."""

import csv
import io
import json
import re
from collections import Counter
from dataclasses import fields, replace
from decimal import Decimal
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from agent.analysis.cost.bill import StatementLine
from agent.catalog.causes import CAUSES, Cause
from agent.outputs.report.document import ReportFigures, document_of
from agent.outputs.report.formats import as_json, html_page, markdown, text
from agent.outputs.report.statements import StatementPeriod, as_csv, as_focus
from agent.outputs.report.tables import ReportTable
from tests.outputs.api.serving import open_api
from tests.outputs.api.test_engine_counts import saving
from tests.outputs.api.test_pool_routes import RUNNING, WAITING, serve
from tests.outputs.api.test_pool_routes import counts as gauges
from tests.outputs.api.traffic import NOW, mixed, verdicts_of
from tests.outputs.report.reported import figures, filled
from tests.real_parts.chromium import grave, opened, overflow


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> ReportFigures:
    """The figures of two hours of traffic."""
    with open_api(tmp_path_factory.mktemp("reported")) as api:
        filled(api)
        return figures(api)


def tables(read: ReportFigures) -> dict[str, ReportTable]:
    return {table.title: table for table in document_of(read).tables}


def test_every_format_has_every_title_and_cell(read: ReportFigures) -> None:
    document = document_of(read)
    pages = (text(document, 500), markdown(document), html_page(document))
    for page in (" ".join(unescape(page).split()) for page in pages):
        assert "SIMULATED: " in page
        assert "2026-09-21 12:19:30 to 2026-09-21 14:19:33 UTC" in page
        for table in document.tables:
            assert table.title.lower() in page.lower()
            for row in table.rows:
                assert [cell for cell in row if plain(cell) not in plain(page)] == []
    assert max(map(len, text(document, 80).splitlines())) <= 80
    found = json.loads(as_json(read))
    assert found["summary"] == read.summary
    assert [event["kind"] for event in found["events"]] == ["RESTART"]


def test_the_first_sentences_say_what_was_kept_why_not_and_what_it_cost(
    read: ReportFigures,
) -> None:
    chat = next(each for each in read.objectives if each["name"] == "chat")
    found = document_of(read).sentences
    (about_chat,) = (each for each in found if "the objective chat" in each)
    assert f" of {chat['met'] + chat['missed']} judged requests met" in about_chat
    assert f"; {chat['missed']} missed." in about_chat
    text_of_burst = CAUSES[Cause.BURST].text
    assert f"75 % of the time over the limits is due to burst. {text_of_burst}" in found
    assert found[-1].startswith("The GPUs cost $")
    unjudged = replace(read, objectives=[{**chat, "attainment": None}])
    assert document_of(unjudged).sentences[0].startswith("No request of this window was judged; ")


def test_a_share_of_almost_all_is_not_rounded_to_all(read: ReportFigures) -> None:
    (chat,) = (each for each in read.objectives if each["name"] == "chat")
    almost = {**chat, "attainment": 0.99996, "met": 24999, "missed": 1}
    (first, *_) = document_of(replace(read, objectives=[almost])).sentences
    assert first.startswith("99.9 % of 25,000 judged requests")


def test_charts_have_the_limits_of_the_objectives(read: ReportFigures) -> None:
    charts = {chart.title: chart for chart in document_of(read).charts}
    by_name = {each["name"]: each["definition"] for each in read.objectives}
    drawn = charts["Time to first token"].limits
    wanted = {1000 * each["ttft_s"] for each in by_name.values() if each["ttft_s"] is not None}
    assert set(drawn.values()) == wanted != set()
    assert all(name.startswith("limit of ") for name in drawn)
    targets = {100 * each["target"] for each in by_name.values() if each["target"] is not None}
    assert set(charts["Attainment"].limits.values()) == targets != set()
    assert charts["Tokens"].limits == {}


def test_events_are_in_words(read: ReportFigures) -> None:
    facts = {"last_sample_at": 1795699480.038628, "preemptions": 3.0, "kv_cache_usage": 0.5}
    more = {"process_memory_bytes": 3 * 2.0**30, "silent_s": 0.25, "cause": None}
    event = {**read.events[0], "kind": "CUDA_OOM", "evidence": facts | more}
    (row,) = tables(replace(read, events=[event]))["Events"].rows
    assert row[1] == "cuda oom"
    assert row[4] == (
        "last sample: 2026-11-26 13:24:40; preemptions: 3; kv cache: 50.00 %; "
        "process memory: 3 GiB; silent: 0.25 s"
    )


def plain(text: str) -> str:
    """The text without what a format adds or replaces so that a name steers nothing."""
    return re.sub(r"[^\w ]", "", " ".join(text.split()))


def test_the_counts_are_those_of_the_requests(read: ReportFigures) -> None:
    begin = NOW - 7200
    seen = Counter(
        verdicts_of(item).get("chat") for item in mixed() if begin <= item.ended_at <= NOW
    )
    seen["missed"] += 1
    row = next(row for row in tables(read)["Objectives"].rows if row[0] == "chat")
    assert row[3:6] == [str(seen[verdict]) for verdict in ("met", "missed", "undetermined")]
    assert ["error ratio", "-"] in [list(row) for row in tables(read)["Traffic"].rows]
    counted = {row[0]: row[1] for row in tables(read)["Counted by the engines themselves"].rows}
    assert (counted["requests"], counted["completed requests/s"]) == ("20", "3")
    rows = tables(read)["Latency by the engines' histograms, ms"].rows
    assert ["ttft", "0.0 to 500", "500 to 1,000", "500 to 1,000", "300"] in [list(r) for r in rows]


def test_whether_caches_and_drafts_pay_and_the_pools_are_shown_where_they_are_known(
    read: ReportFigures, tmp_path: Path
) -> None:
    titles = ("Caches outside the GPU", "Drafts", "Pools of -")
    assert not tables(read).keys() & {*titles}
    with open_api(tmp_path) as api:
        serve(
            api,
            prefill_0=gauges({RUNNING: 4.0, WAITING: 10.0}),
            decode_0=gauges({RUNNING: 8.0, WAITING: 0.5}),
        )
        api.store_engine_sample("chat-0", api.agent.now, saving())
        found = tables(figures(api, "1h"))
    caches, drafts, pools = (found[title] for title in titles)
    assert list(caches.rows[0]) == ["chat-0", "400", "100", "25.00 %", "2", "0.5", "pays"]
    assert list(drafts.rows[0][1:5]) == ["100", "40.00 %", "2.20", "-"]
    assert list(drafts.rows[0][5:]) == ["0.55 to 2.20", "unknown"]
    prefill = next(row for row in pools.rows if row[0] == "prefill")
    assert list(prefill[1:5]) == ["prefill_0", "4", "10", "3.50"]
    assert pools.note is not None
    assert pools.note.startswith("Prefill has 3.29 times the load of decode.")
    assert pools.note.endswith("Add a prefill engine.")


def test_the_causes_have_their_seconds_and_what_to_turn(read: ReportFigures) -> None:
    burst, kv = tables(read)["Causes of misses"].rows
    assert list(burst[:4]) == ["burst", "1", "0.75", "75.00 %"]
    assert list(kv[:4]) == ["kv pressure", "0", "0.25", "25.00 %"]
    assert burst[4] == CAUSES[Cause.BURST].text


def test_no_name_or_evidence_steers_the_terminal_or_the_page(read: ReportFigures) -> None:
    groups = dict(read.groups)
    tenant = {**groups["tenant"]["groups"][0], "group": "<script>alert(1)</script>|\x1b]0;x\x07"}
    groups["tenant"] = {**groups["tenant"], "groups": [tenant]}
    document = document_of(replace(read, groups=groups))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text(document, 200))
    assert "<script>alert" not in markdown(document) + html_page(document)
    widths = {line.count(" | ") for line in _markdown_table(markdown(document), "By tenant")}
    assert len(widths) == 1


def _markdown_table(page: str, title: str) -> list[str]:
    lines = page.split(f"## {title}\n\n")[1].split("\n\n")[0].splitlines()
    return [line.replace("\\|", "") for line in lines]


BROKEN_WORDS = """() => {
  const range = document.createRange(), found = [];
  for (const cell of document.querySelectorAll("td, th")) {
    const text = cell.firstChild;
    for (const {0: word, index} of text?.data?.matchAll(/[^\\s-]+/g) ?? []) {
      range.setStart(text, index);
      range.setEnd(text, index + word.length);
      const tops = new Set([...range.getClientRects()].map((one) => Math.round(one.top)));
      if (tops.size > 1) found.push(word);
    }
  }
  return found;
}"""


@pytest.mark.slow
def test_the_page_draws_its_charts_alone(read: ReportFigures, tmp_path: Path) -> None:
    """The policy in the file lets nothing in from elsewhere, and the file has no address of any."""
    made = html_page(document_of(read))
    file = tmp_path / "report.html"
    file.write_text(made, encoding="utf-8")
    assert not re.search(r"""(?:src|href)\s*=\s*["']|url\(|@import|fetch\(""", made)
    with opened(f"file://{file}") as there:
        page = there.html("Time per output token")
        assert there.problems == []
        there.page.set_viewport_size({"width": 390, "height": 900})
        assert grave(there) == []
        assert overflow(there) == []
        # Words of a cell stay whole: the longest is no wider than the cell.
        broken = there.page.evaluate(BROKEN_WORDS)
        assert broken == []
    assert page.count("<canvas") == 5
    assert """content="default-src 'none'; script-src 'sha256-""" in page


# https://owasp.org/www-community/attacks/CSV_Injection
SIGNS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
ATTACKS = [
    *(
        f"{before}{sign}cmd|' /C calc'!A0"
        for sign in SIGNS
        for before in ("", " ", '"', "'", "\xa0")
    ),
    *(f"{before}cmd" for before in ("\t", "\r", "\n")),
    *(f"team;{sign}cmd" for sign in SIGNS),
    *(f"team{separator}=cmd" for separator in ("\t", "\r", "\n", "|", ";;", '"; ')),
]


PERIOD = StatementPeriod("2026-10-01T00:00:00Z", "2026-11-01T00:00:00Z")


def statement(*groups: str | None) -> str:
    unknown: dict[str, Any] = dict.fromkeys((field.name for field in fields(StatementLine)), None)
    lines = [
        StatementLine(**{**unknown, "line": "tenant", "group": group, "cost_usd": Decimal("-0.5")})
        for group in groups
    ]
    return as_csv(lines, PERIOD)


def is_formula(cell: str) -> bool:
    """Whether a spreadsheet may take it for one; a number is none."""
    content = cell.lstrip(" \xa0\"'")
    marked = "'" in cell[: len(cell) - len(content)]
    return not marked and content.startswith((*SIGNS, "\t", "\r", "\n")) and content != "-0.5"


@pytest.mark.parametrize("delimiter", [",", ";", "\t"], ids=["comma", "semicolon", "tab"])
def test_no_cell_is_a_formula_whatever_separates_cells(delimiter: str) -> None:
    for attack in ATTACKS:
        file = io.StringIO(statement("a name", attack), newline="")
        cells = [cell for row in csv.reader(file, delimiter=delimiter) for cell in row]
        assert [cell for cell in cells if is_formula(cell)] == [], ascii(attack)


def test_every_cell_is_quoted_and_read_back() -> None:
    names = ["acme", 'a "quoted" one', "a,b", "a;b", None]
    text = statement(*names)
    assert all(cell[0] == cell[-1] == '"' for cell in text.splitlines()[1].split(","))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["group"] or None for row in rows] == names
    assert {row["cost_usd"] for row in rows} == {"-0.5"}


def test_a_file_says_of_which_time_and_currency_it_is() -> None:
    (row,) = csv.DictReader(io.StringIO(statement("acme")))
    assert (row["period_begin"], row["period_end"]) == (PERIOD.begin, PERIOD.end)
    assert row["currency"] == "USD"


# https://focus.finops.org: the columns that version 1.2 wants of everybody.
MANDATORY = {
    *("BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency"),
    *("BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory", "ChargeClass"),
    *("ChargeDescription", "ChargePeriodEnd", "ChargePeriodStart", "ContractedCost"),
    *("EffectiveCost", "InvoiceIssuerName", "ListCost", "PricingQuantity", "PricingUnit"),
    *("ProviderName", "PublisherName", "ServiceCategory", "ServiceName"),
}


def test_focus_has_its_columns_and_its_charges_make_up_the_bill() -> None:
    lines = [
        StatementLine(line="tenant", group="=acme", gpu_hours=0.5, cost_usd=Decimal("1.25")),
        StatementLine(line="tenant", group="new", cost_usd=None),
        StatementLine(line="idle", cost_usd=Decimal("0.75")),
        StatementLine(line="bill", gpu_hours=1.0, cost_usd=Decimal("2.00")),
    ]
    rows = list(csv.DictReader(io.StringIO(as_focus("tenant", lines, PERIOD))))
    assert rows[0].keys() >= MANDATORY
    assert all(name.startswith("x_") for name in rows[0] if not name[0].isupper())
    assert sum(Decimal(row["BilledCost"]) for row in rows) == Decimal("2.00")
    acme, idle = rows
    assert (acme["SubAccountId"], acme["ConsumedQuantity"]) == ("'=acme", "0.5")
    assert json.loads(acme["Tags"]) == {"tenant": "'=acme"}
    assert (idle["SubAccountId"], idle["x_Line"], idle["ConsumedQuantity"]) == ("", "idle", "")
    assert {row["ChargePeriodStart"] for row in rows} == {PERIOD.begin}
    assert len(as_focus("tenant", [], PERIOD).splitlines()) == 1
