"""Durations, addresses and URLs in settings, and masked passwords."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from agent.settings.values import (
    MAX_DURATION_S,
    Address,
    DatabaseUrl,
    Duration,
    HttpUrl,
    OtlpUrl,
    SqliteFile,
    TraceUrl,
    did_you_mean,
    duration_s,
    duration_text,
    masked,
)

GPUS = ("H100-SXM", "H100-PCIe", "L40", "L40S")


@pytest.mark.parametrize(
    ("given", "end"),
    [
        ("H100", "; did you mean H100-SXM or H100-PCIe?"),
        ("h100sxm", "; did you mean H100-SXM?"),
        ("L40-S", "; did you mean L40S or L40?"),
        ("TPU", ""),
        ("", ""),
    ],
)
def test_a_name_that_is_unknown_is_compared_with_the_known_ones(given: str, end: str) -> None:
    assert did_you_mean(given, GPUS) == end


@pytest.mark.parametrize(
    ("text", "length_s"),
    [("5s", 5), ("1.5s", 1.5), ("5m", 300), ("12h", 43200), ("30d", 2592000), ("14d", 1209600)],
)
def test_a_duration_is_a_number_and_the_longest_unit_that_fits(text: str, length_s: float) -> None:
    assert duration_s(text) == length_s
    assert duration_text(length_s) == text


@pytest.mark.parametrize(
    "value",
    [
        *("", "5", "s", "5 s", " 5s", "5s ", "5s\n", "-5s", "5ms", "5S", "1e3s", "5m30s", ".5s"),
        *("5.s", "infd", 5, 5.0, None, True),
    ],
)
def test_an_invalid_duration_is_refused_with_the_value_and_an_example(value: object) -> None:
    with pytest.raises(
        ValueError, match="is not a duration; write a number and s, m, h, d or w"
    ) as e:
        duration_s(value)
    assert repr(value) in str(e.value)


def test_a_duration_may_be_in_weeks() -> None:
    assert duration_s("2w") == 14 * 86400


@given(st.integers(1, MAX_DURATION_S) | st.floats(1e-3, 1e6))
def test_a_shown_duration_is_read_as_the_same_length(length_s: float) -> None:
    assert duration_s(duration_text(length_s)) == length_s


@pytest.mark.parametrize("text", ["0s", "0.0d", "36501d", "99999999999999999999w", "9" * 400 + "d"])
def test_a_duration_is_above_zero_and_at_most_a_century(text: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Duration).validate_python(text)


GOOD = {
    Address: ["127.0.0.1:4317", "localhost:0", "[::1]:65535", "0.0.0.0:80"],
    HttpUrl: ["http://h", "https://h:8000", "http://[::1]:1/prefix", "http://u:p@h:65535"],
    TraceUrl: ["https://h/trace/{trace_id}", 'http://h/e?left={"q":"{trace_id}"}&s={span_id}'],
    OtlpUrl: ["http://h:4318", "https://h/v1/traces", "grpc://h:4317"],
    DatabaseUrl: [
        "clickhousedb://u:p@h:8123/d",
        "postgresql://u:p@h/d",
        "postgres://h/d",
        "postgresql+psycopg:///d",
    ],
    SqliteFile: ["goodput.db", "/var/lib/goodput agent/a.db", "../ü:1.db"],
}
BAD = {
    Address: ["", "4317", ":4317", "h:", "h:port", "h:65536", "h:-1", "h:²", "h:4317/"],
    HttpUrl: [
        *("", "h:8000", "h", "ftp://h", "http://", "http://:80", "http:///metrics", "grpc://h:1"),
        *("http://h:0", "http://h:99999", "http://h:x", "http://[::1"),
    ],
    TraceUrl: ["", "https://h/trace", "javascript:{trace_id}", "h/{trace_id}", "ftp://{trace_id}"],
    OtlpUrl: ["", "h:4317", "grpc://h", "grpc://", "tcp://h:1", "http://h:99999", "grpc://h:x"],
    DatabaseUrl: [
        *("", "goodput.db", "sqlite", "sqlite:///x", "mysql://h/d", "postgresql+asyncpg://h"),
    ],
    SqliteFile: ["sqlite:///x", "postgresql://h/d", "file:a.db", "a.db?mode=ro", ":memory:"],
}


@pytest.mark.parametrize(("kind", "value"), [(k, value) for k in GOOD for value in GOOD[k]])
def test_valid_addresses_are_accepted(kind: Any, value: str) -> None:
    assert TypeAdapter(kind).validate_python(value) == value


@pytest.mark.parametrize(("kind", "value"), [(k, value) for k in BAD for value in BAD[k]])
def test_invalid_addresses_are_refused_with_an_example(kind: Any, value: str) -> None:
    with pytest.raises(ValidationError, match=r"is not .*; write "):
        TypeAdapter(kind).validate_python(value)


def test_a_trailing_slash_of_a_url_is_removed() -> None:
    assert TypeAdapter(HttpUrl).validate_python("http://h:8000/") == "http://h:8000"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:pw@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u:p/w@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u:p@w@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u:p:w@h/d", "postgresql://u:***@h/d"),
        ("postgresql://:pw@h/d", "postgresql://:***@h/d"),
        ("postgresql://h/d?user=u&password=pw&sslmode=require", None),
        ("http://u:pw@h:8000", "http://u:***@h:8000"),
        ("http://u@h:8000", "http://u@h:8000"),
        ("http://h:8000/metrics", "http://h:8000/metrics"),
        ("sqlite:///goodput.db", "sqlite:///goodput.db"),
        ("127.0.0.1:4317", "127.0.0.1:4317"),
    ],
)
def test_only_passwords_are_masked(text: str, shown: str | None) -> None:
    expected = shown or "postgresql://h/d?user=u&password=***&sslmode=require"
    assert masked(text) == expected
