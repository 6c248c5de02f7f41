"""Validated settings: objectives in base units, what `shown()` returns, prices."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.catalog.definitions import DEFINITIONS
from agent.catalog.hardware import WeightDtype
from agent.records.model import Parallelism
from agent.records.objective import Match, Objective, SessionLimits
from agent.records.prices import Electricity
from agent.settings import load
from agent.sources.model_config.quantisation import DTYPE_FORMATS
from tests.settings.reading import problem, read, write_settings


def engine_with(keys: str) -> str:
    return f"engines: [{{name: a, url: 'http://a', {keys}}}]"


def objective_of(folder: Path, text: str) -> Objective:
    (only,) = read(folder, f"objectives: [{{{text}}}]").all_objectives()
    return only


def test_configured_keys_override_the_preset(tmp_path: Path) -> None:
    objective = objective_of(
        tmp_path, "name: a, preset: chat, ttft_ms: 50, tpot_ms: null, e2e_ms: 1000"
    )
    assert (objective.ttft_s, objective.tpot_s, objective.e2e_s) == (0.05, None, 1.0)


@pytest.mark.parametrize("compat", DEFINITIONS)
def test_compat_chooses_the_definition(tmp_path: Path, compat: str) -> None:
    objective = objective_of(tmp_path, f"name: a, ttft_ms: 1, compat: {compat}")
    assert objective.definition is DEFINITIONS[compat]


@pytest.mark.parametrize(
    ("keys", "judged"),
    [
        ("", False),
        (", count_invalid: true", True),
        (", compat: aiperf, count_invalid: null", True),
        (", compat: aiperf, count_invalid: false", False),
    ],
)
def test_an_objective_counts_the_mistakes_of_clients_if_it_says_so(
    tmp_path: Path, keys: str, judged: bool
) -> None:
    assert objective_of(tmp_path, f"name: a, ttft_ms: 1{keys}").judges_invalid is judged


def test_tenants_that_the_settings_name_are_known(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        "engines: [{name: e, url: 'http://e'}]\n"
        "proxy: {listen: '127.0.0.1:8080', tenants: [acme, initech], max_tenants: 5}\n"
        "objectives: [{name: a, preset: chat, match: {tenant: vip}},"
        " {name: b, preset: chat, match: {tenant: 'team-*'}}]",
    )
    assert settings.known_tenants() == {"acme", "initech", "vip"}


def test_limits_of_an_objective_are_converted_to_seconds(tmp_path: Path) -> None:
    objective = objective_of(
        tmp_path,
        "name: a.b_c-D, ttft_ms: 0.5, tpot_ms: 20, e2e_ms: 60000, target: 0.999, window: 12h, "
        "match: {model: 'l*', tenant: acme, route: /v1/*, min_input_tokens: 1, "
        "max_input_tokens: 9}, session: {first_turn_ttft_ms: 2000, turn_ttft_ms: 500}",
    )
    assert objective == Objective(
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
        session=SessionLimits(first_turn_ttft_s=2.0, turn_ttft_s=0.5, share_of_turns=0.95),
    )


def test_limits_on_sessions_limit_something(tmp_path: Path) -> None:
    text = "objectives: [{name: a, ttft_ms: 200, session: {share_of_turns: 0.9}}]"
    assert "set first_turn_ttft_ms, turn_ttft_ms or both" in problem(tmp_path, text)


def test_an_engine_of_the_file_in_the_units_of_the_agent(tmp_path: Path) -> None:
    keys = (
        "model_config: m, parallelism: {tensor: 4, data: 2}, dtype: fp8, kv_dtype: fp8, "
        "peak_tflops: 989.4, bandwidth_gb_per_s: 4800, log: /v.log, pids: [12, 13], "
        "same_machine: false, hang_after: 2m, plugin_socket: /run/a.sock, gpu_hour_usd: 0"
    )
    settings = read(tmp_path, f"engines: [{{name: a, url: 'http://a', {keys}}}]")
    (engine,) = settings.engines
    assert engine.model_config_path == Path("m")
    assert engine.parallelism is not None
    assert engine.parallelism.parallelism() == Parallelism(tensor=4, data=2)
    assert (engine.dtype, engine.kv_dtype) == ("fp8", "fp8")
    assert (engine.peak_tflops, engine.bandwidth_gb_per_s) == (989.4, 4800)
    assert (engine.log, engine.pids) == (Path("/v.log"), (12, 13))
    assert (engine.same_machine, engine.hang_after) == (False, 120.0)
    assert engine.plugin_socket == Path("/run/a.sock")
    assert settings.price_list().gpu_hour_usd("a", None, 0.0) == 0


def test_every_weight_dtype_has_a_format() -> None:
    assert set(WeightDtype) == set(DTYPE_FORMATS)


def test_prices_of_gpus_and_of_engines_are_one_list(tmp_path: Path) -> None:
    price_list = read(
        tmp_path,
        "engines: [{name: a, url: 'http://a', gpu_hour_usd: 2}, {name: b, url: 'http://b'}]\n"
        "prices: [{gpu: H100-SXM, gpu_hour_usd: 3}, {engine: b, gpu_hour_usd: 4}]\n"
        "electricity: {usd_per_kwh: 0.2, pue: 1.3}\n",
    ).price_list()
    found = [price_list.gpu_hour_usd(engine, "H100-SXM", 0.0) for engine in ("a", "b", "c")]
    assert found == [2, 4, 3]
    assert price_list.electricity == Electricity(usd_per_kwh=0.2, pue=1.3)


def test_a_token_budget_can_be_configured_and_is_shown(tmp_path: Path) -> None:
    assert read(tmp_path, "").token_budget_usd is None
    assert read(tmp_path, "").shown()["token_budget"] is None
    settings = read(tmp_path, "token_budget: {usd_per_million_output_tokens: 2.5}")
    assert settings.token_budget_usd == 2.5
    assert settings.shown()["token_budget"] == {"usd_per_million_output_tokens": 2.5}
    assert "usd_per_million" in problem(
        tmp_path, "token_budget: {usd_per_million_output_tokens: -1}"
    )


def test_shown_settings_can_be_read_again_and_mean_the_same(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        "name: agent-0\notlp: {http: null}\nstorage: {keep_requests: 90s}\n"
        "engines: [{name: a, url: 'http://h', gpus: [0], scrape_interval: 1.5s,\n"
        "           model_config: config.json}]\n"
        "objectives: [{name: x, preset: chat, ttft_ms: 150, compat: vllm, window: 12h}]\n",
    )
    shown: dict[str, Any] = settings.shown()
    again = load(write_settings(tmp_path, yaml.safe_dump(shown)), {})
    assert again.all_objectives() == settings.all_objectives()
    assert again.shown() == shown
    assert shown["storage"]["keep_requests"] == "90s"
    assert shown["storage"]["query_timeout"] == "10s"
    assert shown["objectives"][0]["window"] == "12h"
    assert shown["engines"][0]["model_config"] == "config.json"


def test_shown_settings_hold_no_password(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        "storage: {publish_to: 'postgresql://u:s3cret@h/d?password=s3cret'}\n"
        "otlp: {forward_to: 'https://u:s3cret@h'}\n"
        "engines: [{name: a, url: 'http://u:s3cret@h:8000'}]\n",
    )
    assert "s3cret" not in yaml.safe_dump(settings.shown())
    assert settings.shown()["storage"]["publish_to"] == "postgresql://u:***@h/d?password=***"
    # Only the shown URL is masked.
    assert settings.storage.publish_to == "postgresql://u:s3cret@h/d?password=s3cret"


@pytest.mark.parametrize(
    ("storage", "own_url", "read_url"),
    [
        ("", "sqlite:///goodput.db", "sqlite:///goodput.db"),
        ("file: /own.db", "sqlite:////own.db", "sqlite:////own.db"),
        ("publish_to: postgresql://h/d", "sqlite:///goodput.db", "postgresql://h/d"),
    ],
)
def test_an_agent_writes_its_file_and_commands_read_the_shared_database_if_there_is_one(
    tmp_path: Path, storage: str, own_url: str, read_url: str
) -> None:
    found = read(tmp_path, f"storage: {{{storage}}}").storage
    assert (found.own_url, found.read_url) == (own_url, read_url)


@pytest.mark.parametrize(
    ("storage", "kept_s"),
    [
        ("keep_requests: 9d, keep_in_file: 2d", 9 * 86400),
        ("publish_to: postgresql://h/d, keep_requests: 9d, keep_in_file: 2d", 2 * 86400),
        ("publish_to: postgresql://h/d, keep_requests: 1d, keep_in_file: 2d", 86400),
    ],
)
def test_requests_that_are_published_leave_the_file_sooner(
    tmp_path: Path, storage: str, kept_s: float
) -> None:
    assert read(tmp_path, f"storage: {{{storage}}}").storage.kept_in_file_s == kept_s


def test_gpus_are_read_from_either_nvml_or_dcgm(tmp_path: Path) -> None:
    assert not read(tmp_path, "dcgm: {url: 'http://h:9400/metrics'}").reads_nvml
    assert read(tmp_path, "{}").reads_nvml
    text = "nvml: {enabled: true}\ndcgm: {url: 'http://h:9400/metrics'}"
    assert "remove nvml.enabled or dcgm.url" in problem(tmp_path, text)


def test_series_of_an_exporter_can_be_added(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        "dcgm:\n  url: http://h:9400\n  fields:\n"
        "    - {series: MY_CLOCK, fact: gpu_clock_hertz, labels: [sm], scale: 1000000}\n",
    )
    (row,) = settings.dcgm.fields
    assert row.field().read(2.0) == 2e6


@pytest.mark.parametrize(
    ("limits", "values"),
    [
        ("{}", []),
        ("{running_requests: 64}", [64]),
        ("{running_requests: 64, step_tokens: 2048, context_tokens: 4096}", [64, 2048, 4096]),
    ],
)
def test_configured_limits_of_an_engine_are_facts(
    tmp_path: Path, limits: str, values: list[int]
) -> None:
    (engine,) = read(tmp_path, engine_with(f"limits: {limits}")).engines
    assert sorted(engine.limits.by_fact().values()) == values
    if values:
        assert engine.limits.by_fact()["llm_engine_max_running_requests"] == 64


MANY = ", ".join(f"{{name: o{number}, ttft_ms: 1}}" for number in range(21))
SOCKET = "is not the path of a socket; write an absolute one of at most 107 bytes, such as"
PRICED = engine_with("gpu_hour_usd: 2")


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        ("objectives: [{name: a, preset: 7b, ttft_ms: null}]", "objectives[0].e2e_ms: no limit is"),
        (f"objectives: [{MANY}]", "objectives: Tuple should have at most 20 items"),
        (
            f"objectives: [{{name: {'x' * 49}, ttft_ms: 1}}]",
            "objectives[0].name: String should have at most 48 characters",
        ),
        (
            engine_with("dtype: bf8"),
            "engines[0].dtype: 'bf8' is not known; known are bf16, fp16, fp32, fp8, int8, int4",
        ),
        (
            engine_with("kv_dtype: int4"),
            "engines[0].kv_dtype: 'int4' is not known; known are bf16, fp16, fp8",
        ),
        (engine_with("gpus: [true]"), "engines[0].gpus[0]: True is not a GPU; write its index or"),
        (engine_with("gpus: [0, 0.5]"), "engines[0].gpus[1]: 0.5 is not a GPU; write its index or"),
        (
            engine_with("gpus: [-1]"),
            "engines[0].gpus[0]: -1 is not a GPU; indexes are from 0 to",
        ),
        (engine_with("gpus: 0"), "engines[0].gpus: must be a list (got 0)"),
        (engine_with("pids: [0]"), "engines[0].pids[0]: "),
        (engine_with("pids: [true]"), "engines[0].pids[0]: "),
        (engine_with("limits: {step_tokens: 0}"), "engines[0].limits.step_tokens: "),
        (
            engine_with("plugin_socket: a.sock"),
            f"engines[0].plugin_socket: 'a.sock' {SOCKET} /run/",
        ),
        (
            engine_with(f"plugin_socket: '/{'x' * 107}'"),
            f"engines[0].plugin_socket: '/{'x' * 107}' {SOCKET} /run/",
        ),
        ("agent_socket: a.sock", f"agent_socket: 'a.sock' {SOCKET} /run/"),
        ("agent_socket: off", "agent_socket: Input should be a valid string (got False)"),
        (
            f"{PRICED}\nprices: [{{engine: z, gpu_hour_usd: 1}}]",
            "prices: prices[0] is of the engine 'z'; known engines: a",
        ),
        (
            f"{PRICED}\nprices: [{{engine: a, gpu_hour_usd: 1}}]",
            "prices: prices[0] and engines[0].gpu_hour_usd both price engine 'a' at the same time",
        ),
        (
            "engines: [{name: a, url: 'http://a', plugin_socket: /a.sock},"
            " {name: b, url: 'http://b', plugin_socket: /a.sock}]",
            "engines: 2 engines have the plugin_socket /a.sock; each needs one",
        ),
        (
            "dcgm: {url: 'http://h', fields: [{series: MY_CLOCK, fact: gpu_clok_hertz}]}",
            "dcgm.fields[0]: dcgm field 'MY_CLOCK': there is no fact 'gpu_clok_hertz'",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, text: str, begin: str) -> None:
    assert problem(tmp_path, text).startswith(begin)
