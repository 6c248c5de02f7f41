"""The `report` command, from a running API and from a database alone."""

import csv
import io
import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agent.cli import main
from agent.errors import AgentError, SettingsInvalid
from tests.outputs.api.serving import Api, open_api
from tests.outputs.report.reported import filled, invoiced
from tests.real_parts.ports import free_port
from tests.records.making import record


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    """An API over an empty database."""
    with open_api(tmp_path) as opened:
        yield opened


def reported(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, ["report", *arguments], env=environment)


def statement_lines(result: Result) -> list[dict[str, str]]:
    assert result.exit_code == 0, result.output
    return list(csv.DictReader(io.StringIO(result.stdout)))


@pytest.fixture(name="invoiced")
def invoiced_api(api: Api, tmp_path: Path) -> Api:
    """10 s of acme, 10 s of globex, and 10 s that are in no row."""
    return invoiced(api, tmp_path)


def test_a_statement_adds_up_to_the_bill(invoiced: Api) -> None:
    result = reported(
        *("--statement", "--by", "tenant", "--format", "csv", "--last", "10m"),
        *("--url", invoiced.url),
    )
    lines = statement_lines(result)
    usd = {line["group"] or line["line"]: Decimal(line["cost_usd"]) for line in lines}
    bill = usd.pop("bill")
    assert bill == Decimal("0.060000")
    assert sum(usd.values()) == bill
    cents = {name: float(100 * cost) for name, cost in usd.items()}
    assert (cents["acme"], cents["'=globex()"]) == pytest.approx((1.0, 1.0), rel=0.05)
    assert cents["unaccounted"] == pytest.approx(1.0, rel=0.3), "an estimate"
    assert cents["unaccounted"] + cents["idle"] == pytest.approx(4.0, rel=0.05)
    assert (cents["not read"], cents["other requests"]) == pytest.approx((0.0, 0.0), abs=0.001)
    acme = next(line for line in lines if line["group"] == "acme")
    assert (acme["requests"], acme["input_tokens"], acme["output_tokens"]) == ("1", "100", "26")


def test_a_statement_is_for_users_too_and_says_what_it_leaves_out(invoiced: Api) -> None:
    asked = ("--statement", "--by", "user", "--last", "10m", "--url", invoiced.url)
    values = json.loads(reported(*asked, "--format", "json").stdout)
    assert values["by"] == "user"
    assert [line["group"] for line in values["lines"] if line["line"] == "user"] == [None]
    assert Decimal(values["lines"][-1]["cost_usd"]) == Decimal("0.06")
    assert "have expired" in reported(*asked).stdout


@pytest.mark.parametrize("shape", ["text", "markdown", "html", "json", "csv"])
def test_a_statement_of_a_simulation_says_so(invoiced: Api, shape: str) -> None:
    asked = ("--statement", "--last", "10m", "--format", shape, "--url", invoiced.url)
    assert "SIMULATED: " in reported(*asked).output


def test_a_report_of_a_database_says_whether_an_agent_of_it_simulates(
    api: Api, tmp_path: Path
) -> None:
    file = str(tmp_path / "goodput.db")
    api.beat("agent-0")
    assert "SIMULATED" not in reported(GOODPUT_STORAGE__FILE=file).stdout
    api.beat("demo", simulated=True)
    assert "SIMULATED: " in reported(GOODPUT_STORAGE__FILE=file).stdout


def test_the_report_of_an_agent_is_that_of_its_figures(api: Api) -> None:
    filled(api)
    values: dict[str, Any] = json.loads(reported("--last", "2h", "--json", "--url", api.url).stdout)
    assert values["summary"] == api.query("summary", window="2h")
    page = reported("--last", "2h", "--width", "80", "--url", api.url).stdout
    assert re.search(rf"requests +{values['summary']['requests']}\n", page)


def test_a_report_is_of_any_window_of_the_past(api: Api) -> None:
    filled(api)
    asked = ("--from", "now-2h", "--until", "now-1m", "--url", api.url)
    values: dict[str, Any] = json.loads(reported(*asked, "--json").stdout)
    past = {"from": "now-2h", "until": "now-1m"}
    assert values["summary"] == api.query("summary", **past)
    assert values["summary"]["requests"]
    assert sum(step["requests"] for step in values["steps"]) == values["summary"]["requests"]
    assert values["objectives"] == api.query("objectives", **past)["items"]
    lines = reported(*asked, "--statement", "--format", "json").stdout
    assert json.loads(lines)["by"] == "tenant"
    mistake = reported("--from", "yesterday", "--url", api.url)
    assert isinstance(mistake.exception, SettingsInvalid | AgentError)
    assert "from: 'yesterday' is not a moment" in str(mistake.exception)


def test_a_report_of_a_database_needs_no_agent(api: Api, tmp_path: Path) -> None:
    """Its window ends now, and the request is of years ago."""
    api.store([record(1)], [])
    file = str(tmp_path / "goodput.db")
    result = reported("--last", "365d", "--format", "json", GOODPUT_STORAGE__FILE=file)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)["summary"]
    assert (summary["requests"], summary["attainment"]) == (1, None)
    output = tmp_path / "report.md"
    reported(
        *("--format", "markdown", "--output", str(output)),
        GOODPUT_STORAGE__FILE=file,
    )
    assert output.read_text(encoding="utf-8").startswith("# goodput-agent report\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--format", "csv"], "add --statement"),
        (["--last", "soon"], "window: 'soon' is not a duration"),
        (["--url", f"http://127.0.0.1:{free_port()}"], ": connection refused; start it"),
        (["--url", "http://agent.invalid"], "at http://agent.invalid: name not found;"),
        (["--url", "127.0.0.1:9470"], "--url: '127.0.0.1:9470' is not the URL of a server"),
        (["--by", "tenant", "--statement", "--last", "900d"], "window: 900d is not between"),
    ],
)
def test_a_mistake_is_one_sentence(
    api: Api, tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    file = str(tmp_path / "goodput.db")
    error = reported(*arguments, GOODPUT_STORAGE__FILE=file).exception
    assert isinstance(error, SettingsInvalid)
    assert complaint in str(error)


def test_a_database_that_is_absent_is_not_made(tmp_path: Path) -> None:
    file = tmp_path / "absent.db"
    error = reported(GOODPUT_STORAGE__FILE=str(file)).exception
    assert "there is no database" in str(error)
    assert not file.exists()


def test_a_database_of_another_revision_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty.db"
    file.touch()
    error = reported(GOODPUT_STORAGE__FILE=str(file)).exception
    assert "run `goodput-agent db upgrade`" in str(error)


def test_a_token_file_holds_one_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    for content in (b"", b"one two", b"\xff\xfe"):
        file.write_bytes(content)
        error = reported("--url", "http://127.0.0.1:1", "--token-file", str(file)).exception
        assert isinstance(error, SettingsInvalid)
        assert f"--token-file: {file} must hold one key or token" in str(error)


def test_a_file_that_cannot_be_written_is_one_sentence(api: Api, tmp_path: Path) -> None:
    below = tmp_path / "file"
    below.touch()
    file = str(tmp_path / "goodput.db")
    error = reported("--output", str(below / "day.html"), GOODPUT_STORAGE__FILE=file).exception
    assert isinstance(error, SettingsInvalid)
    assert "day.html cannot be written: File exists" in str(error)
