"""The reasons in the labels of failure counters."""

import re
from pathlib import Path

import grpc
import pytest

from agent.catalog.reasons import FORWARDS_DROPPED, ProxyFailure, grpc_reason, http_reason

AGENT = Path(__file__).parents[2] / "agent"


def test_every_declared_failure_of_the_proxy_is_reported_somewhere() -> None:
    used: set[str] = set()
    for file in AGENT.rglob("*.py"):
        used |= {*re.findall(r"\bProxyFailure\.(\w+)", file.read_text())}
    assert used == {reason.name for reason in ProxyFailure}


def test_every_grpc_status_code_has_a_reason() -> None:
    codes = {code.name for code in grpc.StatusCode} - {"OK"}
    assert {grpc_reason(code) for code in codes} <= set(FORWARDS_DROPPED)


@pytest.mark.parametrize(
    ("status", "reason"), [(503, "http_503"), (413, "http_413"), (418, "http_other")]
)
def test_rare_http_statuses_of_a_destination_share_a_reason(status: int, reason: str) -> None:
    assert http_reason(status) == reason
    assert reason in FORWARDS_DROPPED
