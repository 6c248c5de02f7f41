"""The `render` command: its files and its output."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from agent.errors import SettingsInvalid
from agent.rendering import render
from tests.render.alerts.cases import expressions, selectors
from tests.render.alerts.promtool import complaints_about_rules

main = typer.Typer()
main.command()(render)

ALERTS = {"goodput-agent.yml", "vllm-alone.yml", "alertmanager.yml"}
DASHBOARDS = {
    f"goodput-{name}.json"
    for name in (
        "fleet",
        "objectives",
        "operations",
        "gpus",
        "capacity",
        "agents",
        "requests",
        "requests-api",
    )
}

KUBERNETES = "deploy/kubernetes/prometheusrule.yaml"

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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with the files of the settings, and what the command printed."""
    folder = tmp_path_factory.mktemp("made")
    config = folder / "settings.yml"
    config.write_text(SETTINGS, encoding="utf-8")
    return folder, run("--config", config, "--into", folder)


def invoke(*arguments: str | Path, **environment: str) -> Result:
    runner = CliRunner(env={"COLUMNS": "160", **environment})
    result = runner.invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run(*arguments: str | Path, **environment: str) -> str:
    result = invoke(*arguments, **environment)
    assert result.exit_code == 0, result.output
    return result.output


def written(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def links(path: Path, annotation: str) -> set[str]:
    """The targets of the links of a file, without the parameters of each alert."""
    found = re.findall(
        rf"{annotation}: (\S+?)(?:/d/\S+|/\w+\.md)", path.read_text(encoding="utf-8")
    )
    return set(found)


def test_it_writes_the_files_into_a_folder(made: tuple[Path, str]) -> None:
    folder, output = made
    for kind, names in (("alerts", ALERTS), ("dashboards", DASHBOARDS)):
        assert {path.name for path in (folder / kind).iterdir()} == names
        assert all(name in output for name in names)
    shown = (folder / "dashboards/goodput-objectives.json").read_text(encoding="utf-8")
    assert '"legendFormat": "tough ttft"' in shown


def test_the_output_has_the_delay_of_each_rule(made: tuple[Path, str]) -> None:
    rows = [line for line in made[1].splitlines() if "tough" in line and "│" in line]
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    assert cells == [
        ["tough", "outage, page", "55 %", "6m", "never", "never"],
        ["tough", "tier 2, page", "60 %", "3h 39m", "never", "never"],
        ["tough", "tier 3, ticket", "30 %", "7h 15m", "14h 27m", "never"],
        ["tough", "tier 4, ticket", "10 %", "7h 15m", "14h 27m", "28h 51m"],
    ]


def test_the_json_has_the_same_delays_in_seconds(settings: Path, tmp_path: Path) -> None:
    found = json.loads(run("--config", settings, "--into", tmp_path, "--json"))
    tough = {each["rule"]: each for each in found["rules"] if each["objective"] == "tough"}
    outage, fourth = tough["outage, page"], tough["tier 4, ticket"]
    assert (outage["fires_above"], fourth["fires_above"]) == (0.55, 0.1)
    minutes = {name: each and round(each / 60) for name, each in fourth["fires_after_s"].items()}
    assert minutes == {"1.0": 7 * 60 + 15, "0.5": 14 * 60 + 27, "0.25": 28 * 60 + 51}
    assert [outage["fires_after_s"][name] for name in ("0.5", "0.25")] == [None, None]
    assert all(Path(name).is_file() for name in found["files"])
    assert any("it would need 144 % of all requests" in remark for remark in found["remarks"])


def test_a_folder_that_cannot_be_written_is_one_sentence(settings: Path) -> None:
    with pytest.raises(SettingsInvalid, match=r"--into: .* cannot be written: Not a directory"):
        run("--config", settings, "--into", settings / "below")


def test_the_output_names_omitted_panels_and_missing_receivers(made: tuple[Path, str]) -> None:
    output = " ".join(made[1].split())
    assert (
        "Objective tough, LlmObjectiveBudgetBurn tier 1: it would need 144 % of all requests to "
        "miss." in output
    )
    assert "300 ms is not a bucket edge; the rule uses 500 ms." in output
    assert "Objective acme, latency percentiles, queue time, error ratio: histograms have" in output
    assert "PAGES REACH NOBODY." in output
    assert "TICKETS REACH NOBODY." in output
    assert "NO DEAD MAN'S SWITCH." in output
    assert "set --deadman to the URL" in output


RULES = ("alerts/goodput-agent.yml", "alerts/vllm-alone.yml", KUBERNETES)
GIVEN = {"dashboards": "https://g.test", "runbooks": "https://r.test/x"}


def test_links_use_the_given_addresses(settings: Path, tmp_path: Path) -> None:
    given = [word for name, url in GIVEN.items() for word in (f"--{name}", f"{url}/")]
    output = run("--config", settings, "--into", tmp_path, *given)
    for file in RULES:
        assert links(tmp_path / file, "runbook_url") == {GIVEN["runbooks"]}
    for file in (RULES[0], KUBERNETES):
        assert links(tmp_path / file, "dashboard_url") == {GIVEN["dashboards"]}
    assert "lead nowhere" not in output


def test_links_lead_to_localhost_or_name_the_missing_address(made: tuple[Path, str]) -> None:
    folder, output = made
    here, alone, kubernetes = (folder / file for file in RULES)
    assert links(here, "runbook_url") == {"http://localhost:9470/runbooks"}
    assert links(here, "dashboard_url") == {"http://localhost:3000"}
    for file in (alone, kubernetes):
        assert links(file, "runbook_url") == {"https://your-goodput-agent.example/runbooks"}
    assert links(kubernetes, "dashboard_url") == {"https://your-grafana.example"}
    assert f"Links to dashboards in {KUBERNETES} lead nowhere yet" in output
    assert f"Links to runbooks in {KUBERNETES} and {RULES[1]} lead nowhere yet" in output


def test_receivers_are_those_of_the_options(settings: Path, tmp_path: Path) -> None:
    output = run(
        *("--config", settings, "--into", tmp_path, "--slack-pages", "#p", "--webhook-token"),
        *("--webhook", "https://w.test/a/", "--secrets", "/s", "--deadman", "https://d.test"),
    )
    page, ticket, deadman, *_ = written(tmp_path / "alerts/alertmanager.yml")["receivers"]
    assert page.keys() - {"name"} == {"slack_configs", "webhook_configs"}
    assert page["slack_configs"][0]["channel"] == "#p"
    assert page["slack_configs"][0]["api_url_file"] == "/s/slack_api_url"
    assert ticket.keys() - {"name"} == {"webhook_configs"}
    assert ticket["webhook_configs"][0]["url"] == "https://w.test/a/"
    assert "/s/webhook_token" in str(ticket)
    assert deadman["webhook_configs"][0]["url"] == "https://d.test"
    assert "NOBODY" not in output
    assert "DEAD MAN" not in output


def test_variables_say_what_options_say_and_options_override_them(
    settings: Path, tmp_path: Path
) -> None:
    options = (
        *("--dashboards", "https://g.test", "--runbooks", "https://r.test", "--pagerduty"),
        *("--slack-pages", "#p", "--slack-tickets", "#t", "--webhook", "https://w.test"),
        *("--webhook-token", "--deadman", "https://d.test", "--secrets", "/s"),
    )
    variables = {}
    for option, value in zip(options, [*options[1:], "--"], strict=True):
        if option.startswith("--"):
            name = f"GOODPUT_RENDER_{option[2:].upper().replace('-', '_')}"
            variables[name] = "true" if value.startswith("--") else value
    run("--config", settings, "--into", tmp_path / "a", *options)
    overridden = {"GOODPUT_RENDER_SLACK_PAGES": "#other"}
    run(
        *("--config", settings, "--into", tmp_path / "b", "--slack-pages", "#p"),
        **{**variables, **overridden},
    )
    for name in ALERTS:
        by_option = (tmp_path / "a/alerts" / name).read_text(encoding="utf-8")
        assert (tmp_path / "b/alerts" / name).read_text(encoding="utf-8") == by_option


def test_severities_and_further_labels_are_those_of_the_options(
    settings: Path, tmp_path: Path
) -> None:
    run(
        *("--config", settings, "--into", tmp_path, "--severity", "critical=P1"),
        *("--severity", "info=none", "--label", "cluster=eu-1", "--label", "team=ml"),
    )
    groups = written(tmp_path / "alerts/goodput-agent.yml")["groups"]
    alerts = [rule["labels"] for each in groups for rule in each["rules"] if "alert" in rule]
    assert {labels["severity"] for labels in alerts} == {"P1", "warning", "none"}
    assert {(labels["cluster"], labels["team"]) for labels in alerts} == {("eu-1", "ml")}
    _, nobody, pages = written(tmp_path / "alerts/alertmanager.yml")["route"]["routes"]
    assert nobody["matchers"] == ['severity="none"']
    assert pages["matchers"] == ['severity="P1"']
    for text in ("critical", "page"):
        rules = (tmp_path / "alerts/goodput-agent.yml").read_text(encoding="utf-8")
        assert f'severity="{text}"' not in rules


def test_a_matcher_is_in_every_selector_and_a_label_of_all_that_rules_make(
    settings: Path, tmp_path: Path
) -> None:
    run("--config", settings, "--into", tmp_path, "--matcher", "cluster=eu-1")
    for file in ("alerts/goodput-agent.yml", "alerts/vllm-alone.yml"):
        document = written(tmp_path / file)
        for expression in expressions(document):
            for name, labels in selectors(expression):
                assert "cluster" in labels, f"{name} in {expression}"
        rules = [rule for group in document["groups"] for rule in group["rules"]]
        assert {rule["labels"]["cluster"] for rule in rules} == {"eu-1"}
        for link in (rule.get("annotations", {}).get("dashboard_url") for rule in rules):
            assert link is None or "&var-cluster=eu-1" in link
        assert complaints_about_rules(tmp_path / file) == ""
    config = written(tmp_path / "alerts/alertmanager.yml")
    assert "cluster" in config["route"]["group_by"]
    assert all("cluster" in rule["equal"] for rule in config["inhibit_rules"])


def test_thresholds_are_those_of_the_options(settings: Path, tmp_path: Path) -> None:
    run("--config", settings, "--into", tmp_path / "usual")
    given = ("--threshold", "queue_requests=30", "--threshold", "error_page_ratio=0.2")
    run("--config", settings, "--into", tmp_path / "own", *given)
    for file in ("alerts/goodput-agent.yml", "alerts/vllm-alone.yml", KUBERNETES):
        usual = (tmp_path / "usual" / file).read_text(encoding="utf-8")
        own = (tmp_path / "own" / file).read_text(encoding="utf-8")
        usual = re.sub(r"(_waiting(?:\{.*\})?\) >|always more than) 10\b", r"\1 30", usual)
        usual = usual.replace('"0.05" |', '"0.2" |')
        assert re.sub(r"> 0\.05$", "> 0.2", usual, flags=re.MULTILINE) == own
        assert "> 30" in own
    chart = "deploy/helm/goodput-agent/files"
    for file in (f"{chart}/rules.yaml", f"{chart}/thresholds.yaml"):
        assert written(tmp_path / "own" / file) == written(tmp_path / "usual" / file)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (("--matcher", "engine=x"), "'engine' is a label that the rules tell series apart by"),
        (("--matcher", 'cluster=a"b'), "may hold letters, digits and _ . : / @ - alone"),
        (("--threshold", "queue_request=3"), "; did you mean queue_requests"),
        (("--threshold", "x=3"), "no threshold is called 'x'; docs/reference/alerts.md lists"),
        (("--threshold", "queue_requests=many"), "queue_requests=many is not a number"),
        (("--threshold", "kv_cache_ratio=95"), "kv_cache_ratio=95 is a ratio; write 0.05 for 5 %"),
        (("--severity", "fatal=P1"), "'fatal' is none of critical, warning, info"),
        (("--severity", "warning=critical"), "two severities have one name"),
        (("--label", "severity=x"), "'severity' is a label of the rules themselves"),
        (("--label", "a-b=x"), "'a-b=x' is not NAME=VALUE"),
        (("--label", "team"), "'team' is not NAME=VALUE"),
    ],
)
def test_labels_that_no_rule_can_have_are_refused(
    option: tuple[str, str], sentence: str, settings: Path, tmp_path: Path
) -> None:
    refused = invoke("--config", settings, "--into", tmp_path / "a", *option)
    assert refused.exit_code == 2
    assert sentence in " ".join(re.sub("[│╭╮╰╯─]", "", refused.output).split())
    assert not (tmp_path / "a").exists()


def test_an_unknown_variable_is_refused(settings: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsInvalid, match="GOODPUT_RENDER_SLACK: render has no such option"):
        run("--config", settings, "--into", tmp_path / "a", GOODPUT_RENDER_SLACK="#x")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("option", ["dashboards", "runbooks", "webhook", "deadman"])
def test_an_invalid_address_is_refused(option: str, settings: Path, tmp_path: Path) -> None:
    result = invoke("--config", settings, "--into", tmp_path / "a", f"--{option}", "w.test/x")
    assert result.exit_code == 2
    assert "'w.test/x' is not a URL; write https://host/path" in result.output
    assert not (tmp_path / "a").exists()


def budgets(folder: Path) -> set[str]:
    """The budget of each file's alert on the cost of tokens."""
    found = set()
    for file in (RULES[0], KUBERNETES):
        text = (folder / file).read_text(encoding="utf-8")
        found.add("".join(re.findall(r"time included; the budget is (\S+)\.", text)))
    return found


def test_a_token_budget_of_the_settings_is_in_the_rules(
    settings: Path, tmp_path: Path, made: tuple[Path, str]
) -> None:
    assert budgets(made[0]) == {""}
    output = run("--config", settings, "--into", tmp_path, "--token-budget", "4")
    assert budgets(tmp_path) == {"4"}
    never = "LlmTokenCostOverBudget can never fire: no GPU has a price."
    assert never in output
    priced = f"{SETTINGS}prices: [{{gpu: L4, gpu_hour_usd: 1}}]\n"
    budget = "token_budget: {usd_per_million_output_tokens: 2.5}"
    settings.write_text(f"{priced}{budget}", encoding="utf-8")
    assert never not in run("--config", settings, "--into", tmp_path)
    assert budgets(tmp_path) == {"2.5"}


def test_a_trial_has_the_given_speed(settings: Path, tmp_path: Path) -> None:
    speed = ("--speed", "60", "--scrape-interval", "1")
    run("--config", settings, "--into", tmp_path, *speed)
    rules = written(tmp_path / "alerts/goodput-agent.yml")
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


@pytest.mark.parametrize("option", ["--speed", "--scrape-interval", "--token-budget"])
@pytest.mark.parametrize("number", ["inf", "nan", "1e300"])
def test_numbers_that_no_rule_can_hold_are_refused(
    tmp_path: Path, option: str, number: str
) -> None:
    ended = invoke("--into", tmp_path, option, number)
    assert ended.exit_code == 2
    assert list(tmp_path.iterdir()) == []
