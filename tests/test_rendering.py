"""The `render` command: what it writes, and what it says."""

from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from agent.errors import SettingsInvalid
from agent.rendering import render

main = typer.Typer()
main.command()(render)

ALERTS = {"goodput-agent.yml", "vllm-alone.yml", "alertmanager.yml"}
DASHBOARDS = {
    f"goodput-{name}.json" for name in ("objectives", "operations", "gpus", "capacity", "requests")
}

SETTINGS = """
objectives:
  - {name: tough, ttft_ms: 300, target: 0.9}
  - {name: acme, match: {tenant: acme}, ttft_ms: 500, target: 0.999}
"""


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "settings.yml"
    path.write_text(SETTINGS, encoding="utf-8")
    return path


def run(*arguments: str | Path) -> str:
    told = CliRunner(env={"COLUMNS": "160"}).invoke(main, [str(argument) for argument in arguments])
    if told.exception is not None and not isinstance(told.exception, SystemExit):
        raise told.exception
    assert told.exit_code == 0, told.output
    return told.output


def test_it_writes_the_files_into_a_folder(settings: Path, tmp_path: Path) -> None:
    said = run("--config", settings, "--into", tmp_path / "made")
    for folder, names in (("alerts", ALERTS), ("dashboards", DASHBOARDS)):
        assert {path.name for path in (tmp_path / "made" / folder).iterdir()} == names
        assert all(name in said for name in names)


def test_dashboards_are_those_of_the_objectives(settings: Path, tmp_path: Path) -> None:
    run("--config", settings, "--into", tmp_path)
    shown = (tmp_path / "dashboards/goodput-objectives.json").read_text(encoding="utf-8")
    assert '"legendFormat": "tough ttft"' in shown


def test_it_says_how_soon_each_rule_tells(settings: Path, tmp_path: Path) -> None:
    said = run("--config", settings, "--into", tmp_path)
    rows = [line for line in said.splitlines() if "tough" in line and "│" in line]
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    assert cells == [
        ["tough", "outage, page", "55 %", "6m", "never", "never"],
        ["tough", "tier 2, page", "60 %", "3h 39m", "never", "never"],
        ["tough", "tier 3, ticket", "30 %", "7h 15m", "14h 27m", "never"],
        ["tough", "tier 4, ticket", "10 %", "7h 15m", "14h 27m", "28h 51m"],
    ]


def test_it_says_what_is_left_out_and_why(settings: Path, tmp_path: Path) -> None:
    said = " ".join(run("--config", settings, "--into", tmp_path).split())
    assert (
        "Objective tough, LlmObjectiveBudgetBurn tier 1: it would need 144 % of all requests to "
        "miss." in said
    )
    assert "300 ms is no bucket edge; it speaks of 500 ms." in said
    assert "Objective acme, latency percentiles, queue time, error ratio: histograms have" in said


def test_links_are_those_that_were_given(settings: Path, tmp_path: Path) -> None:
    run(
        *("--config", settings, "--into", tmp_path, "--dashboards", "https://g.test/"),
        *("--runbooks", "https://r.test", "--webhook", "https://w.test", "--secrets", "/s"),
    )
    rules = (tmp_path / "alerts/goodput-agent.yml").read_text(encoding="utf-8")
    assert "https://g.test/d/goodput-gpus?from=" in rules
    assert "https://r.test/GpuLost.md" in rules
    routes = (tmp_path / "alerts/alertmanager.yml").read_text(encoding="utf-8")
    assert "url: https://w.test\n" in routes
    assert "routing_key_file: /s/pagerduty_routing_key" in routes


def test_a_trial_is_as_fast_as_asked_for(settings: Path, tmp_path: Path) -> None:
    speed = ("--speed", "60", "--scrape-interval", "1")
    run("--config", settings, "--into", tmp_path, *speed)
    rules = yaml.safe_load((tmp_path / "alerts/goodput-agent.yml").read_text(encoding="utf-8"))
    down = next(
        rule
        for group in rules["groups"]
        for rule in group["rules"]
        if rule.get("alert") == "LlmEngineDown"
    )
    assert down["for"] == "2s"
    assert {group["interval"] for group in rules["groups"]} == {"2s"}


def test_wrong_settings_write_nothing(tmp_path: Path) -> None:
    path = tmp_path / "settings.yml"
    path.write_text("objectives: [{name: x}]", encoding="utf-8")
    with pytest.raises(SettingsInvalid, match="no limit is set"):
        run("--config", path, "--into", tmp_path)
    assert not (tmp_path / "alerts").exists()
    assert not (tmp_path / "dashboards").exists()
