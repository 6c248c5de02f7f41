"""The configured limits of an engine."""

from pathlib import Path

from tests.settings.reading import problem, read

ENGINE = "engines: [{{name: a, url: 'http://h', limits: {limits}}}]"


def test_configured_limits_are_returned_by_fact_name(tmp_path: Path) -> None:
    (engine,) = read(tmp_path, ENGINE.format(limits="{running_requests: 64}")).engines
    assert engine.limits.by_fact() == {"llm_engine_max_running_requests": 64}
    (other,) = read(tmp_path, "engines: [{name: a, url: 'http://h'}]").engines
    assert other.limits.by_fact() == {}


def test_all_limits_can_be_set(tmp_path: Path) -> None:
    limits = "{running_requests: 64, step_tokens: 2048, context_tokens: 4096}"
    (engine,) = read(tmp_path, ENGINE.format(limits=limits)).engines
    assert sorted(engine.limits.by_fact().values()) == [64, 2048, 4096]


def test_a_limit_is_at_least_one(tmp_path: Path) -> None:
    assert "engines[0].limits.step_tokens" in problem(
        tmp_path, ENGINE.format(limits="{step_tokens: 0}")
    )
