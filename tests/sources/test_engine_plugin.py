"""Datagrams of the engine's plugin, and the sockets that receive them."""

import math
import os
import random
import socket
import stat
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from goodput_agent_vllm.datagrams import (
    HEADER,
    RequestFigures,
    StepFigures,
    count_record,
    hello_record,
    request_record,
    served_record,
    step_record,
)
from goodput_agent_vllm.reporting import Reporter
from goodput_agent_vllm.sending import Sender
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.catalog.metrics import UNKNOWN
from agent.catalog.reasons import PluginDropped
from agent.errors import SettingsInvalid
from agent.records.engine import EndedRequest, EngineStep, ServedRequest
from agent.records.request import ProxyView, RequestRecord, Vantage
from agent.sources.engine_plugin import PluginReceiver
from agent.sources.plugin_records import PluginRecords, read_datagram
from agent.sources.plugin_sockets import PluginSocket, SenderLookup
from agent.sources.proxy.measuring.served_request import record_bytes, record_from
from tests.plugins.vllm_counts import NOW, finished, header, iteration, scheduler
from tests.real_parts.waiting import eventually
from tests.records.making import record as request_of

READ_AT = 1_790_000_000.0
STEP = StepFigures(0, READ_AT, 0.02, 10, 20, 3, 4, 5, 1, 0.5, 0, False)
REQUEST = RequestFigures(READ_AT, 100, 11, 32, 1, 0.25, 0.5, 1.0, 2.0, 0.9, "length", "chatcmpl-1")


def datagram(*records: bytes, count: int | None = None) -> bytes:
    return header(7, len(records) if count is None else count, 40, 2) + b"".join(records)


def read(data: bytes) -> PluginRecords:
    content = read_datagram(data, "chat-0", READ_AT)
    assert content is not None
    return content


def test_the_header_is_read() -> None:
    content = read(datagram(hello_record(), step_record(STEP), request_record(REQUEST)))
    assert (content.run, content.first, content.records, content.dropped) == (7, 40, 3, 2)
    assert (len(content.steps), len(content.ended)) == (1, 1)
    assert not content.refused


@pytest.mark.parametrize("data", [b"", b"GPAV", b"x" * 500, b"\0" * 32])
def test_a_datagram_of_something_else_is_not_read(data: bytes) -> None:
    assert read_datagram(data, "chat-0", READ_AT) is None


WHOLE = datagram(step_record(STEP), request_record(REQUEST))


@pytest.mark.parametrize(
    ("data", "steps", "reason", "count"),
    [
        (WHOLE[:4] + b"\2" + WHOLE[5:], 0, PluginDropped.OTHER_FORMAT, 2),
        (WHOLE[:-1], 1, PluginDropped.MALFORMED, 1),
        (datagram(step_record(STEP), count=65_535), 1, PluginDropped.MALFORMED, 65_534),
    ],
    ids=["another format", "cut", "without the records of its header"],
)
def test_a_datagram_gives_its_whole_records_and_counts_the_others(
    data: bytes, steps: int, reason: PluginDropped, count: int
) -> None:
    content = read(data)
    assert (len(content.steps), content.ended) == (steps, [])
    assert content.refused == {reason: count}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        *(
            ({"ended_at": at}, PluginDropped.TIME)
            for at in (math.inf, math.nan, READ_AT + 3600, 0.0)
        ),
        *(({"kv_usage": share}, PluginDropped.VALUE) for share in (1.5, math.nan)),
        *(
            ({count: 4_000_000_000}, PluginDropped.VALUE)
            for count in ("prefill_tokens", "preempted", "input_tokens")
        ),
        *(({"finish_reason": reason}, PluginDropped.VALUE) for reason in ("<script>", "")),
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


def test_unknown_and_impossible_times_and_counts_are_none() -> None:
    nan: dict[str, Any] = dict.fromkeys(
        ("queue_s", "prefill_s", "decode_s", "e2e_s", "ttft_s"), math.nan
    )
    (ended,) = read(datagram(request_record(REQUEST._replace(cached_tokens=-1, **nan)))).ended
    assert ended.cached_tokens is ended.queue_s is ended.prefill_s is None
    assert ended.decode_s is ended.e2e_s is ended.ttft_s is None
    (step,) = read(datagram(step_record(STEP._replace(duration_s=math.nan)))).steps
    assert step.duration_s is None
    longer_than_the_request = REQUEST._replace(prefill_s=50_000.0, cached_tokens=101)
    (ended,) = read(datagram(request_record(longer_than_the_request))).ended
    assert (ended.prefill_s, ended.cached_tokens, ended.queue_s) == (None, None, 0.25)


@pytest.mark.parametrize("text", ["x" * 256, "ä" * 160])
def test_the_longest_id_is_read(text: str) -> None:
    (ended,) = read(datagram(request_record(REQUEST._replace(request_id=text)))).ended
    assert ended.request_id == text


@given(st.binary(max_size=600), st.integers(0, 3))
@settings(max_examples=100)
def test_any_bytes_give_records_or_reasons(data: bytes, kind: int) -> None:
    body = struct.pack("<4sBBHQQQ", b"GPAV", 1, 0, 3, 1, 2, 3) + bytes([kind]) + data
    content = read(body)
    assert len(content.steps) + len(content.ended) + content.refused.total() <= 3
    read_datagram(data, "chat-0", READ_AT)


def test_bits_that_flip_raise_nothing() -> None:
    chance = random.Random(5)
    whole = datagram(*[step_record(STEP), request_record(REQUEST)] * 4)
    for _ in range(2000):
        flipped = bytearray(whole)
        for _ in range(8):
            flipped[chance.randrange(HEADER.size, len(whole))] ^= 1 << chance.randrange(8)
        read(bytes(flipped))


WITHIN_S = 60.0


@dataclass
class Consumer:
    steps: list[EngineStep] = field(default_factory=list)
    ended: list[EndedRequest] = field(default_factory=list)
    served: list[ServedRequest] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    fails: bool = False

    def on_step(self, step: EngineStep) -> None:
        if self.fails:
            raise ValueError("a consumer that fails")
        self.threads.add(threading.current_thread().name)
        self.steps.append(step)

    def on_ended(self, ended: EndedRequest) -> None:
        self.ended.append(ended)

    def on_served(self, served: ServedRequest) -> None:
        self.served.append(served)


@dataclass
class Counts:
    received: Counter[str] = field(default_factory=Counter)
    dropped: Counter[tuple[str, PluginDropped]] = field(default_factory=Counter)
    counted: Counter[tuple[str, str, int]] = field(default_factory=Counter)

    def plugin_received(self, engine: str, steps: int, requests: int) -> None:
        self.received.update({f"{engine} steps": steps, f"{engine} requests": requests})

    def plugin_dropped(self, engine: str, reason: PluginDropped, count: int) -> None:
        self.dropped[engine, reason] += count

    def plugin_counted(self, engine: str, name: str, status_class: int, count: int) -> None:
        self.counted[engine, name, status_class] += count


@pytest.fixture
def consumer() -> Consumer:
    return Consumer()


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sockets" / "chat-0.sock"


def receiver(path: Path, counts: Counts, *consumers: Consumer) -> PluginReceiver:
    sockets = [PluginSocket((path.with_stem(engine),), engine) for engine in ("chat-0", "chat-1")]
    return PluginReceiver(sockets, consumers, counts, now=lambda: NOW)


@pytest.fixture
def listening(path: Path, counts: Counts, consumer: Consumer) -> Iterator[PluginReceiver]:
    with closing(receiver(path, counts, Consumer(fails=True), consumer)) as opened:
        opened.start()
        yield opened


@pytest.fixture
def sender(path: Path, listening: PluginReceiver) -> Iterator[Sender]:
    with closing(Sender(str(path), pause_s=0.0)) as opened:
        yield opened


def test_each_consumer_gets_all_records_of_the_sockets_engine(
    sender: Sender, listening: PluginReceiver, consumer: Consumer, counts: Counts
) -> None:
    reporter = Reporter(sender, now=lambda: NOW)
    reporter.step(scheduler(), iteration(finished(), finished(request_id="chatcmpl-2")), 0)
    eventually(lambda: len(consumer.ended) == 2, within_s=WITHIN_S, what="two ended requests")
    assert [step.engine for step in consumer.steps] == ["chat-0"]
    assert [ended.request_id for ended in consumer.ended] == ["chatcmpl-1", "chatcmpl-2"]
    # The consumer before it fails at every step.
    assert consumer.threads == {"engine-plugins"}
    assert counts.received == {"chat-0 steps": 1, "chat-0 requests": 2}
    assert counts.dropped.total() == 0
    assert (listening.heard_at("chat-0"), listening.step_at("chat-0")) == (NOW, NOW)
    assert (listening.heard_at("chat-1"), listening.step_at("chat-1")) == (None, None)


def test_what_did_not_arrive_is_counted_by_who_dropped_it(
    path: Path, listening: PluginReceiver, counts: Counts
) -> None:
    # Numbers 0 to 3 arrive, the plugin drops three, and four are lost on the way.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as plugin:
        for first, dropped in ((0, 0), (4 + 3 + 4, 3), (15 + 2, 5)):
            records = b"\x01\0\0\0" * 4
            plugin.sendto(header(77, 4, first, dropped) + records, str(path.with_stem("chat-1")))
        eventually(
            lambda: counts.dropped["chat-1", PluginDropped.AGENT_BEHIND] == 5,
            within_s=WITHIN_S,
            what="the drops",
        )
    assert counts.dropped["chat-1", PluginDropped.LOST] == 4
    assert listening.heard_at("chat-1") == NOW


def test_a_plugin_goes_on_with_the_next_agent(
    path: Path, counts: Counts, consumer: Consumer
) -> None:
    first = receiver(path, counts)
    first.start()
    with closing(Sender(str(path), pause_s=0.0)) as sender:
        reporter = Reporter(sender, now=lambda: NOW)
        reporter.step(scheduler(), iteration(), 0)
        eventually(lambda: counts.received["chat-0 steps"] == 1, within_s=WITHIN_S, what="a step")
        first.close()
        reporter.step(scheduler(), iteration(finished()), 0)
        with closing(receiver(path, counts, consumer)) as second:
            second.start()

            def arrived() -> bool:
                reporter.hello()
                return len(consumer.ended) == 1

            eventually(arrived, within_s=WITHIN_S, what="what the plugin kept meanwhile")
    assert counts.dropped.total() == 0


def test_the_socket_is_for_its_user_and_group(path: Path, listening: PluginReceiver) -> None:
    mode = path.stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o660
    listening.close()
    assert list(path.parent.iterdir()) == []


def test_a_socket_that_nobody_reads_is_replaced(path: Path, counts: Counts) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
        left.bind(str(path))
    with closing(receiver(path, counts)) as opened:
        opened.start()


@pytest.mark.parametrize("link", [False, True])
def test_a_file_or_a_link_is_not_replaced(path: Path, counts: Counts, link: bool) -> None:
    path.parent.mkdir()
    file = path.with_name("file")
    file.write_text("a log")
    if link:
        path.symlink_to(file)
    else:
        path.write_text("a log")
    with closing(receiver(path, counts)) as opened, pytest.raises(SettingsInvalid) as refused:
        opened.start()
    assert "no socket; choose another path" in refused.value.problems[0]
    assert (path.is_symlink(), path.read_text()) == (link, "a log")


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM])
def test_the_socket_of_another_program_is_left_to_it(
    path: Path, counts: Counts, kind: socket.SocketKind
) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, kind) as other:
        other.bind(str(path))
        if kind != socket.SOCK_DGRAM:
            other.listen()
        with (
            closing(receiver(path, counts)) as opened,
            pytest.raises(
                SettingsInvalid, match=f"plugin_socket of engine chat-0: {path} is the socket of"
            ),
        ):
            opened.start()
        with socket.socket(socket.AF_UNIX, kind) as client:
            client.connect(str(path))


def test_the_stop_removes_only_the_file_that_the_start_made(
    path: Path, listening: PluginReceiver
) -> None:
    log = path.with_name("log")
    log.write_text("a log of another program")
    # In one step: the receiver makes a deleted socket again.
    log.rename(path)
    eventually(listening.problems, within_s=WITHIN_S, what="the problem")
    listening.close()
    assert path.read_text() == "a log of another program"
    assert not path.with_stem("chat-1").exists()


def proxy_record(**given: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "vantage": Vantage.PROXY,
        "ended_at": NOW,
        "proxied": ProxyView(gaps={-3: 4}, streamed=True, choices=2),
    }
    return request_of(**{**values, **given})


def test_a_request_of_the_middleware_comes_with_the_figures_of_its_choices(
    sender: Sender, consumer: Consumer, counts: Counts
) -> None:
    sent = proxy_record()
    figures = [request_record(REQUEST), request_record(REQUEST._replace(request_id="other"))]
    sender.add(served_record(record_bytes(sent), figures, proxied=True))
    sender.add(hello_record())
    sender.flush()
    eventually(lambda: consumer.served, within_s=WITHIN_S, what="the request")
    (found,) = consumer.served
    assert found.record == sent._replace(engine="chat-0", received_at=NOW)
    assert [each.request_id for each in found.choices] == [REQUEST.request_id, "other"]
    assert found.proxied
    assert counts.received["chat-0 requests"] == 1
    assert counts.dropped.total() == 0


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"", PluginDropped.MALFORMED),
        (b"\x81\xa8trace_id\x01", PluginDropped.VALUE),
        (record_bytes(proxy_record(trace_id="x" * 32)), PluginDropped.VALUE),
        (record_bytes(proxy_record(span_id="")), PluginDropped.VALUE),
        (record_bytes(proxy_record(vantage=Vantage.ENGINE)), PluginDropped.VALUE),
        (record_bytes(proxy_record(proxied=None)), PluginDropped.VALUE),
        (record_bytes(proxy_record(ended_at=NOW + 3600)), PluginDropped.TIME),
        (record_bytes(proxy_record(ended_at=float("nan"))), PluginDropped.VALUE),
        *(
            (record_bytes(proxy_record(**values)), PluginDropped.VALUE)
            for values in (
                {"ttft_s": -5.0},
                {"e2e_s": math.inf},
                {"output_tokens": -7},
                {"http_status": 10**12},
                {"request_id": "x" * 257},
                {"proxied": ProxyView(gaps={10**9: 1})},
                {"proxied": ProxyView(gaps={-3: -5})},
                {"proxied": ProxyView(input_bytes=-1)},
            )
        ),
    ],
)
def test_a_request_that_cannot_be_true_is_refused_and_the_others_stay(
    sent: bytes, reason: PluginDropped
) -> None:
    good = served_record(record_bytes(proxy_record()), (), proxied=False)
    bad = served_record(sent, (), proxied=False)
    content = read_datagram(header(1, 3, 0, 0) + good + bad + good, "chat-0", NOW)
    assert content is not None
    assert len(content.served) == 2
    assert content.refused == {reason: 1}


def test_a_request_that_ended_after_its_receipt_is_moved_to_it() -> None:
    record = proxy_record()
    sent = served_record(record_bytes(record), (), proxied=False)
    content = read_datagram(header(1, 1, 0, 0) + sent, "chat-0", record.ended_at - 1.0)
    assert content is not None
    (moved,) = [each.record for each in content.served]
    assert moved.ended_at == record.ended_at - 1.0
    assert moved.started_at == record.started_at - 1.0


def test_fields_of_another_version_are_left_out() -> None:
    known = msgspec.msgpack.decode(record_bytes(proxy_record()))
    newer = {**known, "invented": [1, {"deep": True}], "proxied": {**known["proxied"], "new": 1}}
    assert record_from(msgspec.msgpack.encode(newer)) == proxy_record()


def test_what_a_front_counts_is_added(
    path: Path, listening: PluginReceiver, counts: Counts
) -> None:
    with closing(Sender(str(path), pause_s=0.0)) as one, closing(Sender(str(path))) as other:
        for sender, more in ((one, 2), (one, 5), (other, 3)):
            sender.add(count_record("/tokenize", 2, more))
            sender.flush()
        one.add(count_record("body_unreadable", 0, 1))
        one.flush()
        eventually(
            lambda: counts.counted["chat-0", "body_unreadable", 0], within_s=WITHIN_S, what="it"
        )
    assert counts.counted["chat-0", "/tokenize", 2] == 2 + 5 + 3


def test_a_choice_that_is_refused_is_counted_and_its_request_stays() -> None:
    figures = [
        request_record(REQUEST._replace(ended_at=NOW)),
        request_record(REQUEST)[:-330] + b"\xff" * 330,
    ]
    sent = served_record(record_bytes(proxy_record()), figures, proxied=False)
    content = read_datagram(header(1, 1, 0, 0) + sent, "chat-0", NOW)
    assert content is not None
    assert len(content.served[0].choices) == 1
    assert content.refused == {PluginDropped.VALUE: 1}


# The shared socket


class Lookup(SenderLookup):
    """Knows the engines of these processes."""

    def __init__(self, engines: dict[int, str]) -> None:
        super().__init__({8000: "chat-0", 8001: "chat-1"})
        self.engines = engines

    def engine_of(self, pid: int) -> str | None:
        return self.engines.get(pid)


@contextmanager
def sharing(
    path: Path, counts: Counts, engines: dict[int, str], *consumers: Consumer
) -> Iterator[PluginReceiver]:
    sockets = [PluginSocket((path,), senders=Lookup(engines))]
    with closing(PluginReceiver(sockets, consumers, counts, now=lambda: NOW)) as opened:
        opened.start()
        yield opened


def test_a_record_is_of_the_engine_of_the_process_that_sent_it(
    path: Path, counts: Counts, consumer: Consumer
) -> None:
    with (
        sharing(path, counts, {os.getpid(): "chat-1"}, consumer) as opened,
        closing(Sender(str(path), pause_s=0.0)) as sender,
    ):
        Reporter(sender, now=lambda: NOW).step(scheduler(), iteration(finished()), 0)
        eventually(lambda: consumer.ended, within_s=WITHIN_S, what="the request")
        assert [step.engine for step in consumer.steps] == ["chat-1"]
        assert [ended.engine for ended in consumer.ended] == ["chat-1"]
        assert counts.received == {"chat-1 steps": 1, "chat-1 requests": 1}
        assert (opened.heard_at("chat-0"), opened.heard_at("chat-1")) == (None, NOW)
    assert counts.dropped.total() == 0


def test_records_of_an_unknown_process_are_counted_and_said_once(
    path: Path, counts: Counts, consumer: Consumer, caplog: pytest.LogCaptureFixture
) -> None:
    """That its plugin is there is no record: a front says so before it listens."""
    with (
        sharing(path, counts, {}, consumer) as opened,
        closing(Sender(str(path), pause_s=0.0)) as sender,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger,
    ):
        reporter = Reporter(sender, now=lambda: NOW)
        reporter.hello()
        stranger.sendto(b"x" * 500, str(path))
        eventually(counts.dropped.total, within_s=WITHIN_S, what="what came after it")
        assert not [each for each in caplog.records if "no known engine" in each.getMessage()]
        counts.dropped.clear()
        for _ in range(2):
            reporter.step(scheduler(), iteration(finished()), 0)
        unknown = (UNKNOWN, PluginDropped.UNKNOWN_ENGINE)
        eventually(lambda: counts.dropped[unknown] == 4, within_s=WITHIN_S, what="the drops")
        assert opened.heard_at("chat-0") is opened.heard_at("chat-1") is None
    assert counts.dropped.total() == 4
    assert not consumer.steps
    assert not consumer.ended
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    why = "it does not listen on port 8000, 8001"
    assert said == [f"the plugin in process {os.getpid()} is of no known engine: {why}"]


def test_a_datagram_of_something_else_is_of_no_engine(path: Path, counts: Counts) -> None:
    with (
        sharing(path, counts, {}),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger,
    ):
        stranger.sendto(b"x" * 500, str(path))
        eventually(lambda: counts.dropped.total(), within_s=WITHIN_S, what="the datagram")
    assert counts.dropped == {(UNKNOWN, PluginDropped.NOT_OURS): 1}


def test_an_agent_begins_to_listen_when_the_one_before_it_ends(
    path: Path, counts: Counts, consumer: Consumer
) -> None:
    engines = {os.getpid(): "chat-0"}
    with (
        sharing(path, Counts(), engines) as first,
        sharing(path, counts, engines, consumer) as next_,
    ):
        assert next_.problems() == [f"agent_socket: {path} is the socket of another program"]
        first.close()
        eventually(lambda: not next_.problems(), within_s=WITHIN_S, what="the socket")
        with closing(Sender(str(path), pause_s=0.0)) as sender:
            Reporter(sender, now=lambda: NOW).step(scheduler(), iteration(), 0)
            eventually(lambda: consumer.steps, within_s=WITHIN_S, what="a step")
    assert list(path.parent.iterdir()) == []


def test_a_shared_socket_that_was_deleted_is_made_again(
    path: Path, counts: Counts, consumer: Consumer, caplog: pytest.LogCaptureFixture
) -> None:
    with sharing(path, counts, {os.getpid(): "chat-0"}, consumer) as opened:
        path.unlink()
        eventually(path.is_socket, within_s=WITHIN_S, what="the socket")
        with closing(Sender(str(path), pause_s=0.0)) as sender:
            Reporter(sender, now=lambda: NOW).step(scheduler(), iteration(), 0)
            eventually(lambda: consumer.steps, within_s=WITHIN_S, what="a step")
        assert opened.problems() == []
    assert f"the socket was deleted, and made again at {path}" in caplog.text
