"""What the settings come to: objectives in base units, what is shown, prices."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.catalog.definitions import DEFINITIONS
from agent.catalog.precision import WeightDtype
from agent.catalog.presets import PRESETS
from agent.records.model import Parallelism
from agent.records.objective import Match, Objective
from agent.records.prices import Electricity
from agent.settings import Settings, load
from agent.sources.model_config.quantisation import DTYPE_FORMATS
from tests.settings.reading import problem, read, written


def promise(folder: Path, text: str) -> Objective:
    (only,) = read(folder, f"objectives: [{{{text}}}]").promised()
    return only


# The limits in seconds on TTFT and TPOT, the share of errors, and the tokens per second.
REQUIRED_PRESETS = {
    "interactive": (0.5, 0.03, None, None),
    "chat": (0.2, 0.12, 0.001, None),
    "7b": (0.1, None, None, 1000),
    "13b": (0.2, None, None, 500),
    "70b": (0.5, None, None, 100),
}


@pytest.mark.parametrize("preset", REQUIRED_PRESETS)
def test_a_preset_promises_what_the_guides_do(tmp_path: Path, preset: str) -> None:
    told = promise(tmp_path, f"name: a, preset: {preset}")
    promised = (told.ttft_s, told.tpot_s, told.max_error_ratio, told.min_output_tokens_per_s)
    assert promised == REQUIRED_PRESETS[preset]
    assert told.e2e_s is None


def test_there_is_no_preset_beside_these() -> None:
    assert set(PRESETS) == set(REQUIRED_PRESETS)


def test_own_keys_win_over_the_preset(tmp_path: Path) -> None:
    told = promise(tmp_path, "name: a, preset: chat, ttft_ms: 50, tpot_ms: null, e2e_ms: 1000")
    assert (told.ttft_s, told.tpot_s, told.e2e_s) == (0.05, None, 1.0)


def test_a_preset_without_its_limits_promises_nothing(tmp_path: Path) -> None:
    told = problem(tmp_path, "objectives: [{name: a, preset: 7b, ttft_ms: null}]")
    assert told.startswith("objectives[0].e2e_ms: no limit is set")


@pytest.mark.parametrize("compat", DEFINITIONS)
def test_compat_chooses_the_definition(tmp_path: Path, compat: str) -> None:
    told = promise(tmp_path, f"name: a, ttft_ms: 1, compat: {compat}")
    assert told.definition is DEFINITIONS[compat]


def test_the_definition_is_our_own_where_none_is_chosen(tmp_path: Path) -> None:
    assert promise(tmp_path, "name: a, ttft_ms: 1").definition.name == "goodput"


def test_an_objective_is_kept_in_seconds(tmp_path: Path) -> None:
    told = promise(
        tmp_path,
        "name: a.b_c-D, ttft_ms: 0.5, tpot_ms: 20, e2e_ms: 60000, target: 0.999, window: 12h, "
        "match: {model: 'l*', tenant: acme, route: /v1/*, min_input_tokens: 1, "
        "max_input_tokens: 9}",
    )
    assert told == Objective(
        name="a.b_c-D",
        definition=DEFINITIONS["goodput"],
        target=0.999,
        window_s=43200.0,
        match=Match(
            model="l*", tenant="acme", route="/v1/*", min_input_tokens=1, max_input_tokens=9
        ),
        ttft_s=0.0005,
        tpot_s=0.02,
        e2e_s=60.0,
    )


def test_objectives_keep_the_order_of_the_file(tmp_path: Path) -> None:
    told = read(tmp_path, "objectives: [{name: b, preset: chat}, {name: a, preset: chat}]")
    assert [promised.name for promised in told.promised()] == ["b", "a"]


def test_no_objective_may_be_promised_at_all(tmp_path: Path) -> None:
    assert read(tmp_path, "objectives: []").promised() == ()


@pytest.mark.parametrize("kind", ["auto", "vllm", "sglang", "tgi", "trtllm"])
@pytest.mark.parametrize("role", ["both", "prefill", "decode"])
def test_every_engine_and_role_can_be_named(tmp_path: Path, kind: str, role: str) -> None:
    text = f"engines: [{{name: a, url: 'http://h', kind: {kind}, role: {role}}}]"
    (engine,) = read(tmp_path, text).engines
    assert (engine.kind, engine.role) == (kind, role)


def test_a_model_and_how_it_is_spread_can_be_said(tmp_path: Path) -> None:
    text = (
        "engines: [{name: a, url: 'http://a', model_config: m, parallelism: {tensor: 4, data: 2}}]"
    )
    (engine,) = read(tmp_path, text).engines
    assert engine.model_config_path == Path("m")
    assert engine.parallelism is not None
    assert engine.parallelism.parallelism() == Parallelism(tensor=4, data=2)


def test_what_the_config_and_our_table_do_not_tell_can_be_said(tmp_path: Path) -> None:
    said = "dtype: fp8, kv_dtype: fp8, peak_tflops: 989.4, bandwidth_gb_per_s: 4800"
    (engine,) = read(tmp_path, f"engines: [{{name: a, url: 'http://a', {said}}}]").engines
    assert (engine.dtype, engine.kv_dtype) == ("fp8", "fp8")
    assert (engine.peak_tflops, engine.bandwidth_gb_per_s) == (989.4, 4800)
    (engine,) = read(tmp_path, "engines: [{name: a, url: 'http://a'}]").engines
    assert (engine.dtype, engine.kv_dtype, engine.peak_tflops) == (None, None, None)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("dtype: bf8", "dtype: 'bf8' is not known; known are bf16, fp16, fp32, fp8, int8, int4"),
        ("kv_dtype: int4", "kv_dtype: 'int4' is not known; known are bf16, fp16, fp8"),
        ("peak_tflops: 0", "peak_tflops: Input should be greater than 0"),
        ("bandwidth_gb_per_s: -1", "bandwidth_gb_per_s: Input should be greater than 0"),
    ],
)
def test_what_cannot_be_of_a_gpu_or_a_model_is_refused(tmp_path: Path, said: str, why: str) -> None:
    assert f"engines[0].{why}" in problem(
        tmp_path, f"engines: [{{name: a, url: 'http://a', {said}}}]"
    )


def test_every_way_in_which_weights_are_kept_can_be_read() -> None:
    assert set(WeightDtype) == set(DTYPE_FORMATS)


def test_gpus_may_cost_nothing(tmp_path: Path) -> None:
    told = read(tmp_path, "engines: [{name: a, url: 'http://a', gpu_hour_usd: 0}]").price_list()
    assert told.gpu_hour_usd("a", None, 0.0) == 0


def test_prices_of_gpus_and_of_engines_are_one_list(tmp_path: Path) -> None:
    told = read(
        tmp_path,
        "engines: [{name: a, url: 'http://a', gpu_hour_usd: 2}, {name: b, url: 'http://b'}]\n"
        "prices: [{gpu: H100-SXM, gpu_hour_usd: 3}, {engine: b, gpu_hour_usd: 4}]\n"
        "electricity: {usd_per_kwh: 0.2, pue: 1.3}\n",
    ).price_list()
    prices = [told.gpu_hour_usd(engine, "H100-SXM", 0.0) for engine in ("a", "b", "c")]
    assert prices == [2, 4, 3]
    assert told.electricity == Electricity(usd_per_kwh=0.2, pue=1.3)


def test_a_budget_for_tokens_can_be_said_and_is_shown(tmp_path: Path) -> None:
    assert read(tmp_path, "").token_budget_usd is None
    assert read(tmp_path, "").shown()["token_budget"] is None
    told = read(tmp_path, "token_budget: {usd_per_million_output_tokens: 2.5}")
    assert told.token_budget_usd == 2.5
    assert told.shown()["token_budget"] == {"usd_per_million_output_tokens": 2.5}
    variable = "GOODPUT_TOKEN_BUDGET__USD_PER_MILLION_OUTPUT_TOKENS"
    assert load(None, {variable: "3"}).token_budget_usd == 3


@pytest.mark.parametrize("wrong", ["-1", ".nan", "cheap", "null"])
def test_a_budget_that_cannot_be_is_refused(tmp_path: Path, wrong: str) -> None:
    text = f"token_budget: {{usd_per_million_output_tokens: {wrong}}}"
    assert problem(tmp_path, text).startswith("token_budget.usd_per_million_output_tokens: ")


@pytest.mark.parametrize(
    ("prices", "said"),
    [
        (
            "{engine: z, gpu_hour_usd: 1}",
            "prices: prices[0] is of the engine 'z', which is none of a",
        ),
        (
            "{engine: a, gpu_hour_usd: 1}",
            "prices: prices[0] and engines[0].gpu_hour_usd both price engine 'a' at the same time; "
            "end one where the other begins, or remove it",
        ),
    ],
)
def test_a_price_of_nothing_or_twice_is_refused(tmp_path: Path, prices: str, said: str) -> None:
    engines = "engines: [{name: a, url: 'http://a', gpu_hour_usd: 2}]"
    assert problem(tmp_path, f"{engines}\nprices: [{prices}]") == said


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ("[true]", "engines[0].gpus[0]: True is no GPU; write its index or its UUID"),
        ("[0, 0.5]", "engines[0].gpus[1]: 0.5 is no GPU; write its index or its UUID"),
        ("[-1]", "engines[0].gpus[0]: -1 is no GPU; indexes count from 0"),
        ("0", "engines[0].gpus: must be a list (got 0)"),
    ],
)
def test_gpus_are_a_list_of_indexes_and_uuids(tmp_path: Path, gpus: str, said: str) -> None:
    assert problem(tmp_path, f"engines: [{{name: a, url: 'http://h', gpus: {gpus}}}]") == said


def test_what_is_shown_can_be_read_again_and_means_the_same(tmp_path: Path) -> None:
    told = read(
        tmp_path,
        "name: agent-0\notlp: {http: null}\nstorage: {keep_requests: 90s}\n"
        "engines: [{name: a, url: 'http://h', gpus: [0], scrape_interval: 1.5s,\n"
        "           model_config: config.json}]\n"
        "objectives: [{name: x, preset: chat, ttft_ms: 150, compat: vllm, window: 12h}]\n",
    )
    shown: dict[str, Any] = told.shown()
    again = load(written(tmp_path, yaml.safe_dump(shown)), {})
    assert again.promised() == told.promised()
    assert again.shown() == shown
    assert shown["storage"]["keep_requests"] == "90s"
    assert shown["objectives"][0]["window"] == "12h"
    assert shown["engines"][0]["model_config"] == "config.json"


def test_what_is_shown_holds_no_password(tmp_path: Path) -> None:
    told = read(
        tmp_path,
        "storage: {url: 'postgresql://u:s3cret@h/d?password=s3cret'}\n"
        "otlp: {forward_to: 'https://u:s3cret@h'}\n"
        "engines: [{name: a, url: 'http://u:s3cret@h:8000'}]\n",
    )
    assert "s3cret" not in yaml.safe_dump(told.shown())
    assert told.shown()["storage"]["url"] == "postgresql://u:***@h/d?password=***"
    # Shown, not forgotten.
    assert told.storage.url == "postgresql://u:s3cret@h/d?password=s3cret"


def test_settings_do_not_change_once_they_are_read() -> None:
    told = Settings()
    with pytest.raises(ValueError, match="frozen"):
        told.listen.port = 1


def test_objectives_that_one_column_cannot_name_are_refused(tmp_path: Path) -> None:
    many = "\n".join(f"  - {{name: o{number}, ttft_ms: 1}}" for number in range(21))
    assert "at most 20 items" in problem(tmp_path, f"objectives:\n{many}")
    long = f"objectives: [{{name: {'x' * 49}, ttft_ms: 1}}]"
    assert "at most 48 characters" in problem(tmp_path, long)


def test_what_an_agent_needs_to_see_of_an_engine_can_be_told(tmp_path: Path) -> None:
    (engine,) = read(
        tmp_path,
        "engines: [{name: a, url: 'http://h', log: /var/log/vllm.log, pids: [12, 13],\n"
        "           same_machine: false, hang_after: 2m}]\n",
    ).engines
    assert (engine.log, engine.pids) == (Path("/var/log/vllm.log"), (12, 13))
    assert (engine.same_machine, engine.hang_after) == (False, 120.0)


@pytest.mark.parametrize("pid", ["0", "-1", "true", "'12'", "1.5"])
def test_a_pid_is_a_number_above_zero(tmp_path: Path, pid: str) -> None:
    text = f"engines: [{{name: a, url: 'http://h', pids: [{pid}]}}]"
    assert "engines[0].pids[0]" in problem(tmp_path, text)


def test_gpus_are_read_from_one_place(tmp_path: Path) -> None:
    assert not read(tmp_path, "dcgm: {url: 'http://h:9400/metrics'}").reads_nvml
    assert read(tmp_path, "{}").reads_nvml
    text = "nvml: {enabled: true}\ndcgm: {url: 'http://h:9400/metrics'}"
    assert "remove nvml.enabled or dcgm.url" in problem(tmp_path, text)


def test_series_of_an_exporter_can_be_added(tmp_path: Path) -> None:
    told = read(
        tmp_path,
        "dcgm:\n  url: http://h:9400\n  fields:\n"
        "    - {series: MY_CLOCK, fact: gpu_clock_hertz, labels: [sm], scale: 1000000}\n",
    )
    (row,) = told.dcgm.fields
    assert row.field().read(2.0) == 2e6


def test_a_series_that_tells_no_fact_of_ours_is_named(tmp_path: Path) -> None:
    text = "dcgm: {url: 'http://h', fields: [{series: MY_CLOCK, fact: gpu_clok_hertz}]}"
    assert "gpu_clok_hertz" in problem(tmp_path, text)
