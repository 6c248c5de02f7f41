"""Promtool's checks and tests of a rule file."""

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.real_parts.alertmanager import program
from tests.render.alerts.selecting import rule_groups


def complaints(
    folder: Path, rules: str, tests: Iterable[Mapping[str, Any]], *, every: str = "1m"
) -> str:
    """Complaints of `promtool test rules` about these tests of these rules; empty when they pass.

    `every` is how often the rules are looked at. Left to itself promtool takes the groups in any
    order, so that alerts may find no younger recording than one of that age, which is none at all
    once it is older than the five minutes that PromQL looks back.
    """
    document = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": every,
        "group_eval_order": [group["name"] for group in rule_groups(rules)],
        "tests": [dict(test) for test in tests],
    }
    (folder / "rules.yml").write_text(rules, encoding="utf-8")
    # JSON is YAML, and is written much sooner.
    (folder / "tests.yml").write_text(json.dumps(document), encoding="utf-8")
    finished = subprocess.run(
        [program("promtool"), "test", "rules", "tests.yml"],
        cwd=folder,
        # It makes much garbage in little memory: a third of its time was collecting it, in more
        # threads than there are processors.
        env={**os.environ, "GOGC": "800", "GOMAXPROCS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if finished.returncode == 0 else finished.stdout + finished.stderr


def complaints_about_rules(path: Path) -> str:
    """Complaints of `promtool check rules` about a file; empty when it passes."""
    finished = subprocess.run(
        [program("promtool"), "check", "rules", "--lint=all", "--lint-fatal", path],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if finished.returncode == 0 else finished.stdout + finished.stderr
