"""The rules for vLLM alone, on a Prometheus that scrapes a page of the real one."""

import re
import textwrap
from pathlib import Path

import yaml

from agent.render.alerts import render_alerts
from agent.render.alerts.alert_files import VLLM_ALONE
from agent.settings.settings_model import ObjectiveSettings
from tests.real_parts.prometheus import Prometheus, scrape_of
from tests.real_parts.waiting import eventually
from tests.render.alerts.selecting import expressions, series_of
from tests.sources.engines.wire import EngineServer

PAGE = Path(__file__).parents[2] / "sources/engines/pages/vllm-0.32.0.txt"
RUNBOOK = Path(__file__).parents[3] / "docs/runbooks/VllmMissing.md"
WITHIN_S = 60.0
# What releases before 0.11 call it.
OLDER = {'vllm:gpu_cache_usage_perc{engine!=""}'}


def test_each_selector_finds_its_series_in_an_exposition_of_the_real_vllm(tmp_path: Path) -> None:
    promised = ObjectiveSettings(name="chat", ttft_ms=200, tpot_ms=120, e2e_ms=10_000).objective()
    rules = yaml.safe_load(render_alerts([promised])[VLLM_ALONE])
    asked = {
        series
        for expression in expressions(rules)
        for series in series_of(expression)
        if not series.startswith("ALERTS{")
    }
    with EngineServer() as engine:
        engine.answers("/metrics", PAGE.read_bytes())
        with Prometheus(tmp_path, scrape_of("vllm", engine.url)) as prometheus:
            eventually(lambda: prometheus.query("up == 1"), within_s=WITHIN_S, what="a scrape")
            missing = {series for series in asked if not prometheus.query(series)}
    assert missing == OLDER
    assert len(asked) > 10


def test_an_exposition_of_ray_is_read_with_the_relabelling_of_the_runbook(tmp_path: Path) -> None:
    """Its series get vLLM's own names; without that the rules see no engine at all."""
    page = (PAGE.parent / "vllm-0.32.0-ray.txt").read_bytes()
    block = re.search(r"^ +```yaml\n(.*?)```", RUNBOOK.read_text(encoding="utf-8"), re.M | re.S)
    assert block is not None
    with EngineServer() as engine:
        engine.answers("/metrics", page)
        config = scrape_of("vllm", engine.url)
        (scrape,) = config["scrape_configs"]
        renamed = {**scrape, "job_name": "renamed", **yaml.safe_load(textwrap.dedent(block[1]))}
        config["scrape_configs"] = [scrape, renamed]
        with Prometheus(tmp_path, config) as prometheus:
            seen = 'vllm:num_requests_running{engine!=""}'
            eventually(lambda: prometheus.query(seen), within_s=WITHIN_S, what="a scrape")
            assert {row["metric"]["job"] for row in prometheus.query(seen)} == {"renamed"}
            steps = 'rate(vllm:iteration_tokens_total_count{engine!=""}[1m])'
            eventually(lambda: prometheus.query(steps), within_s=WITHIN_S, what="steps")
