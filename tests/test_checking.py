from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent.cli import main
from tests.sources.engines.fixture_pages import body
from tests.sources.engines.wire import EngineServer

WITHOUT = b"vllm:kv_cache_usage_perc"


def check(engine: EngineServer, tmp_path: Path) -> tuple[int, str]:
    settings = tmp_path / "agent.yml"
    settings.write_text(f"engines: [{{name: chat, url: '{engine.url}'}}]\n")
    ended = CliRunner().invoke(main, ["check", "--engines", "--config", str(settings)])
    return ended.exit_code, ended.stdout


@pytest.mark.parametrize(
    ("page", "absent"),
    [
        (body("vllm-0.32.0"), "facts, none is absent"),
        (
            body("vllm-0.32.0").replace(WITHOUT, b"vllm:kv_cache_used_ratio"),
            "; absent: llm_engine_kv_cache_usage_ratio (some engines",
        ),
    ],
)
def test_check_lists_the_facts_that_an_engine_does_not_give(
    tmp_path: Path, page: bytes, absent: str
) -> None:
    with EngineServer() as engine:
        engine.answers("/metrics", page)
        code, said = check(engine, tmp_path)
    assert code == 0
    assert said.startswith("engine chat: vllm, model tiny-llama, ")
    assert absent in said


def test_check_fails_for_an_engine_that_cannot_be_read(tmp_path: Path) -> None:
    with EngineServer() as engine:
        engine.answers("/metrics", b"<html></html>\n")
        assert check(engine, tmp_path) == (1, "engine chat: cannot be read: html\n")
