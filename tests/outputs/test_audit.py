"""An audit reads well on a terminal, and is JSON for a program."""

import json

import pytest

from agent.analysis.audit.auditing import CHECKS, audit
from agent.outputs.audit import audit_json
from tests.analysis.audit.evidence import with_engine
from tests.outputs.golden import WIDTHS, badly_started, printed_audit, recorded


def test_the_text_is_the_recorded_one() -> None:
    assert printed_audit(badly_started(), WIDTHS[0]) == recorded("audit.txt")


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_printed_audit(width: int) -> None:
    assert max(len(line) for line in printed_audit(badly_started(), width).splitlines()) <= width


def test_an_engine_cannot_steer_the_printed_audit() -> None:
    text = printed_audit(with_engine(models=("tiny\x1b[2J[bold]llama",), version="1\x07"), 80)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]llama" in text


def test_the_json_has_every_line() -> None:
    of = badly_started()
    found = json.loads(audit_json(of, audit(of)))
    assert [line["check"] for line in found["lines"]] == [check.name for check in CHECKS]
    assert sum(found["counts"].values()) == len(CHECKS)
    (first,) = (line for line in found["lines"] if line["check"] == "prefix caching")
    assert first == {
        "area": "KV cache",
        "check": "prefix caching",
        "finding": "fail",
        "seen": "off",
        "why": CHECKS[0].why,
        "change": "remove --no-enable-prefix-caching",
    }
    assert found["engine"] == "http://127.0.0.1:8000"
