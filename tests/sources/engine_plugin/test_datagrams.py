"""The datagrams of a plugin, and those of somebody else."""

import math
import random
import struct
from typing import Any

import pytest
from goodput_agent_vllm.datagrams import (
    HEADER,
    RequestFigures,
    StepFigures,
    hello_record,
    request_record,
    step_record,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.catalog.reasons import PluginDropped
from agent.sources.engine_plugin.datagrams import PluginRecords, read_datagram
from tests.plugins.vllm_counts import header

NOW = 1_790_000_000.0
STEP = StepFigures(0, NOW, 0.02, 10, 20, 3, 4, 5, 1, 0.5, 0, False)
REQUEST = RequestFigures(NOW, 100, 11, 32, 1, 0.25, 0.5, 1.0, 2.0, 0.9, "length", "chatcmpl-1")


def datagram(*records: bytes, count: int | None = None) -> bytes:
    return header(7, len(records) if count is None else count, 40, 2) + b"".join(records)


def read(data: bytes) -> PluginRecords:
    content = read_datagram(data, "chat-0", NOW)
    assert content is not None
    return content


def test_the_header_is_read() -> None:
    content = read(datagram(hello_record(), step_record(STEP), request_record(REQUEST)))
    assert (content.run, content.first, content.records, content.dropped) == (7, 40, 3, 2)
    assert (len(content.steps), len(content.ended)) == (1, 1)
    assert not content.refused


@pytest.mark.parametrize("data", [b"", b"GPAV", b"x" * 500, b"\0" * 32])
def test_a_datagram_of_something_else_is_not_read(data: bytes) -> None:
    assert read_datagram(data, "chat-0", NOW) is None


def test_another_format_is_counted_and_not_guessed() -> None:
    data = bytearray(datagram(step_record(STEP)))
    data[4] = 2
    content = read(bytes(data))
    assert content.steps == []
    assert content.refused == {PluginDropped.OTHER_FORMAT: 1}


def test_a_cut_datagram_gives_its_whole_records() -> None:
    content = read(datagram(step_record(STEP), request_record(REQUEST))[:-1])
    assert (len(content.steps), content.ended) == (1, [])
    assert content.refused == {PluginDropped.MALFORMED: 1}


def test_records_that_are_not_there_are_counted() -> None:
    content = read(datagram(step_record(STEP), count=65_535))
    assert content.refused == {PluginDropped.MALFORMED: 65_534}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"ended_at": math.inf}, PluginDropped.TIME),
        ({"ended_at": math.nan}, PluginDropped.TIME),
        ({"ended_at": NOW + 3600}, PluginDropped.TIME),
        ({"ended_at": 0.0}, PluginDropped.TIME),
        ({"kv_usage": 1.5}, PluginDropped.VALUE),
        ({"kv_usage": math.nan}, PluginDropped.VALUE),
        ({"prefill_tokens": 4_000_000_000}, PluginDropped.VALUE),
        ({"preempted": 4_000_000_000}, PluginDropped.VALUE),
        ({"input_tokens": 4_000_000_000}, PluginDropped.VALUE),
        ({"finish_reason": "<script>"}, PluginDropped.VALUE),
        ({"finish_reason": ""}, PluginDropped.VALUE),
        *(
            ({"request_id": text}, PluginDropped.REQUEST_ID)
            for text in ("", "x" * 257, "x" * 5000, "a\0b", "a\nb")
        ),
    ],
)
def test_impossible_values_are_refused(changed: dict[str, Any], reason: PluginDropped) -> None:
    good = step_record(STEP), request_record(REQUEST)
    made: tuple[tuple[Any, Any], ...] = ((STEP, step_record), (REQUEST, request_record))
    for figures, record in made:
        if changed.keys() <= set(figures._fields):
            content = read(datagram(record(figures._replace(**changed)), *good))
            assert (len(content.steps), len(content.ended)) == (1, 1)
            assert content.refused == {reason: 1}


def test_unknown_values_are_none() -> None:
    unknown: dict[str, Any] = dict.fromkeys(
        ("queue_s", "prefill_s", "decode_s", "e2e_s", "ttft_s"), math.nan
    )
    record = request_record(REQUEST._replace(cached_tokens=-1, **unknown))
    (ended,) = read(datagram(record)).ended
    assert ended.cached_tokens is ended.queue_s is ended.prefill_s is None
    assert ended.decode_s is ended.e2e_s is ended.ttft_s is None
    (step,) = read(datagram(step_record(STEP._replace(duration_s=math.nan)))).steps
    assert step.duration_s is None


def test_a_phase_longer_than_the_request_is_unknown() -> None:
    record = request_record(REQUEST._replace(prefill_s=50_000.0, cached_tokens=101))
    (ended,) = read(datagram(record)).ended
    assert (ended.prefill_s, ended.cached_tokens, ended.queue_s) == (None, None, 0.25)


def test_the_longest_id_is_read() -> None:
    for text in ("x" * 256, "ä" * 160):
        record = request_record(REQUEST._replace(request_id=text))
        (ended,) = read(datagram(record)).ended
        assert ended.request_id == text


@given(st.binary(max_size=600), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_records_or_reasons(data: bytes, kind: int) -> None:
    body = struct.pack("<4sBBHQQQ", b"GPAV", 1, 0, 3, 1, 2, 3) + bytes([kind]) + data
    content = read(body)
    assert len(content.steps) + len(content.ended) + content.refused.total() <= 3
    read_datagram(data, "chat-0", NOW)


def test_bits_that_flip_raise_nothing() -> None:
    chance = random.Random(5)
    whole = datagram(*[step_record(STEP), request_record(REQUEST)] * 4)
    for _ in range(2000):
        flipped = bytearray(whole)
        for _ in range(8):
            flipped[chance.randrange(HEADER.size, len(whole))] ^= 1 << chance.randrange(8)
        read(bytes(flipped))
