"""Promtool's checks and tests of a rule file, and incidents amid which all counters are reset."""

import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.real_parts.alertmanager import program
from tests.render.alerts.cases import Case, Scene, firing, rule_groups


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
    finished = subprocess.run(
        [program("promtool"), "check", "rules", "--lint=all", "--lint-fatal", path],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if finished.returncode == 0 else finished.stdout + finished.stderr


_COUNTER = re.compile(r"[\w:]+_(?:total|bucket|count)\{")
# Of promtool's notation: a start, a step and how often.
_TOKEN = re.compile(r"(_|stale|[\d.]+)(?:\+([\d.]+))?(?:x(\d+))?")


def restarted(case: Case, where: str = "") -> Scene | None:
    """Counters that are reset during the incident neither end nor prolong it.

    None if the incident has no counters.
    """
    _, at, after = case.minutes
    counters = {
        name: anew(values, at) for name, values in case.incident.items() if _COUNTER.match(name)
    }
    if not counters:
        return None
    return {**case.incident, **counters}, [
        firing(at, {case.alert: 1, **case.also}, where),
        firing(after, case.left, where),
    ]


def anew(values: str, minute: int) -> str:
    """The values of a counter that is back at 0 at a minute."""
    every = list(_samples(values))
    lost = every[minute] if minute < len(every) else None
    if not isinstance(lost, float):
        return values
    later = (sample if isinstance(sample, str) else _later(sample, lost) for sample in every)
    return " ".join(str(sample) for sample in [*every[:minute], *list(later)[minute:]])


def _later(sample: float, lost: float) -> float:
    """The growth since then; a counter that is lower by now was reset by itself."""
    return sample - lost if sample >= lost else sample


def _samples(values: str) -> Iterator[float | str]:
    for token in values.split():
        found = _TOKEN.fullmatch(token)
        assert found is not None, token
        start, step, times = found.groups()
        if start in ("_", "stale"):
            yield from [start] * int(times or 1)
        else:
            yield from (float(start) + n * float(step or 0) for n in range(int(times or 0) + 1))
