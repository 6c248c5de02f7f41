"""The `objectives suggest` command, from a running API and from a database alone."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agent.catalog import engine_facts as fact
from agent.cli import main
from agent.errors import SettingsInvalid
from agent.records.objective import Objective
from agent.records.request import Status
from agent.settings import load
from tests.outputs.api.serving import Api, open_api
from tests.outputs.api.test_engine_counts import counts
from tests.records.making import NOON, record

MODEL = "meta-llama/Llama[1]"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with open_api(tmp_path) as opened:
        opened.agent.now = NOON + 300.0 + 7.0
        yield opened


def suggested(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, ["objectives", "suggest", *arguments], env=environment)


def settings_of(result: Result, folder: Path) -> tuple[Objective, ...]:
    """The objectives of settings that the output was pasted into."""
    assert result.exit_code == 0, (result.output, result.exception)
    file = folder / "pasted.yml"
    file.write_text(f"engines: []\n{result.stdout}")
    return load(file, {}).all_objectives()


def fill(api: Api) -> None:
    """Requests of a model with two lengths, and some of another; 200 of each."""
    api.store(
        [
            *(record(n, model=MODEL, ttft_s=0.001 * n, tpot_s=0.02) for n in range(1, 201)),
            *(
                record(n, model=MODEL, ttft_s=0.9, tpot_s=0.03, input_tokens=5000)
                for n in range(201, 401)
            ),
            *(record(n, model="qwen", status=Status.CANCELLED) for n in range(401, 601)),
            *(record(n, model="tiny") for n in range(601, 606)),
        ],
        [],
    )


def test_limits_are_proposed_as_settings_with_what_they_would_have_had(
    api: Api, tmp_path: Path
) -> None:
    fill(api)
    result = suggested("--url", api.url)
    short, long = settings_of(result, tmp_path)
    assert (short.ttft_s, short.tpot_s, short.target) == (0.2, 0.02, 0.95)
    assert (long.ttft_s, long.tpot_s) == (0.9, 0.03)
    assert short.match.covers(MODEL, None, None, 1023)
    assert not short.match.covers(MODEL, None, None, 1024)
    assert long.match.covers(MODEL, None, None, 1024)
    assert not long.match.covers("other", None, None, 1024)
    assert "ttft_ms: 200  # p50 100, p95 190, p99 198 ms; 100 % kept it" in result.stdout
    assert "target: 0.95  # 100 % of 200 requests met it" in result.stdout
    assert '# No proposal for "tiny": 5 requests are too few.' in result.stdout
    assert "qwen" not in result.stdout


def test_a_model_has_one_objective_if_that_is_asked_for(api: Api, tmp_path: Path) -> None:
    fill(api)
    (only,) = settings_of(
        suggested("--url", api.url, "--by-model", "--target", "0.9", "--model", MODEL), tmp_path
    )
    assert (only.target, only.ttft_s) == (0.9, 0.9)


def test_a_database_needs_no_agent_and_figures_can_be_read_by_a_program(
    api: Api, tmp_path: Path
) -> None:
    """Its window ends now, and the requests are of years ago."""
    fill(api)
    file = str(tmp_path / "goodput.db")
    result = suggested("--last", "365d", "--json", GOODPUT_STORAGE__FILE=file)
    assert result.exit_code == 0, result.output
    short, _ = json.loads(result.stdout)["objectives"]
    assert (short["model"], short["requests"], short["attainment"]) == (MODEL, 200, 1.0)
    assert short["limits"][0]["seen_ms"]["p95"] == pytest.approx(190.0)


@pytest.mark.parametrize(
    ("asked", "failed", "target", "said"),
    [
        ("0.95", 0.0, 0.95, "p95 up to 1000, p99 up to 1000 ms; at least 99 % kept it"),
        (
            "0.95",
            100.0,
            0.742,
            "target: 0.742  # at least 74.2 % of 400 requests met it, 100 failed; 0.95, as asked "
            "for, was not kept",
        ),
        # No target is proposed above the share that was seen.
        ("0.9999", 0.0, 0.99, "# at least 99 % of 300 requests met it; 0.9999, as asked for, was"),
    ],
)
def test_an_engine_that_nobody_traces_has_proposals_of_its_histograms(
    api: Api, tmp_path: Path, asked: str, failed: float, target: float, said: str
) -> None:
    counted = counts(requests=400.0)
    counters = dict(counted.counters)
    if failed:
        counters[fact.REQUESTS_FINISHED.name, ("error",)] = failed
    counted = replace(counted, counters=counters)
    api.store_engine_sample("chat-0", api.agent.now - 2.0, counted)
    result = suggested("--url", api.url, "--target", asked)
    (only,) = settings_of(result, tmp_path)
    assert (only.ttft_s, only.target, only.match.model) == (1.0, target, "*")
    assert "From the engines' histograms" in result.stdout
    assert said in result.stdout


def test_a_target_that_was_kept_is_proposed_however_high_it_is(api: Api, tmp_path: Path) -> None:
    fill(api)
    short, _ = settings_of(suggested("--url", api.url, "--target", "0.9999"), tmp_path)
    assert short.target == 0.9999


def test_a_model_that_only_an_engine_names_is_one_that_could_be_meant(api: Api) -> None:
    known = {"agent": "a", "up": True, "dialect": "vllm", "read_at": None}
    api.agent.engines = [{**known, "name": "chat-0", "model": "qwen-7b"}]
    error = suggested("--url", api.url, "--model", "qwen-8b").exception
    assert "no request of the last 24h is of 'qwen-8b'; did you mean qwen-7b?" in str(error)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--model", "tiny"], "too few requests to propose limits: 5 of the last 24h have a lat"),
        (["--model", "tinny"], "no request of the last 24h is of 'tinny'; did you mean tiny?"),
    ],
)
def test_too_little_to_go_by_is_one_sentence(api: Api, words: list[str], complaint: str) -> None:
    fill(api)
    error = suggested("--url", api.url, *words).exception
    assert isinstance(error, SettingsInvalid)
    assert complaint in str(error)
