"""Plays recorded responses to a measurement, as the relay would."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.records.request import ProxyView, RequestRecord
from agent.sources.proxy.exchange import Arrival, Ending, Exchange, Measuring, RawHeaders
from agent.sources.proxy.measuring.measured_exchange import MeasuringOptions, RequestMeasuring

STREAMS = Path(__file__).with_name("streams")
VERSION = "vllm-0.32.0-"
REQUESTS: dict[str, dict[str, Any]] = json.loads((STREAMS / "requests.json").read_bytes())
PAIRS = sorted(name.removesuffix(".plain") for name in REQUESTS if name.endswith(".plain"))

STREAM_HEAD: RawHeaders = ((b"content-type", b"text/event-stream; charset=utf-8"),)
JSON_HEAD: RawHeaders = ((b"content-type", b"application/json"),)
MODEL = "tiny-llama"
ARRIVED_AT = 1_790_000_000.0
ARRIVED_AT_S = 500.0

# Ids of tool calls and of messages inside a response have other forms.
_RESPONSE_ID = re.compile(rb'"id": ?"((?:chatcmpl|cmpl|resp)-?_?(?!tool)[0-9a-z]+)"')


def recorded(name: str) -> bytes:
    return (STREAMS / f"{VERSION}{name}.sse").read_bytes()


def recorded_whole(name: str) -> bytes:
    return (STREAMS / f"{VERSION}{name}.json").read_bytes()


def route(name: str) -> str:
    protocol = name.replace(".", "-").partition("-")[0]
    return "/v1/chat/completions" if protocol == "chat" else f"/v1/{protocol}"


def events(stream: bytes) -> list[bytes]:
    """The events of a recorded stream, which vLLM sends one at a time."""
    return [event + b"\n\n" for event in stream.split(b"\n\n") if event]


def ids_in(response: bytes) -> set[str]:
    """The ids of the forms of responses, from anywhere in the text."""
    return {found.decode() for found in _RESPONSE_ID.findall(response)}


class Span:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    span_id = "b7ad6b7169203331"
    headers: RawHeaders = ((b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad-01"),)

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.response_models: list[str | None] = []

    def end(self, record: RequestRecord, response_model: str | None) -> None:
        self.records.append(record)
        self.response_models.append(response_model)


class Tracing:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def begin(self, headers: RawHeaders) -> Span:
        self.spans.append(Span())
        return self.spans[-1]


@dataclass
class Setup:
    options: MeasuringOptions = field(default_factory=MeasuringOptions)
    sink: Callable[[RequestRecord], None] | None = None
    records: list[RequestRecord] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    tracing: Tracing = field(default_factory=Tracing)

    def __post_init__(self) -> None:
        self.measuring: Measuring = RequestMeasuring(
            "agent-0",
            self.tracing,
            self.sink or self.records.append,
            self.failures.append,
            self.options,
        )

    def begin(self, path: str, body: bytes | None, headers: RawHeaders = ()) -> Exchange:
        return self.measuring.begin(
            Arrival(
                method="POST",
                path=path,
                headers=headers,
                body=body,
                at=ARRIVED_AT,
                at_s=ARRIVED_AT_S,
            )
        )

    def play(
        self,
        path: str,
        request: Any,
        pieces: Iterable[bytes],
        *,
        headers: RawHeaders = (),
        status: int = 200,
        head: RawHeaders = STREAM_HEAD,
        ending: Ending = Ending.COMPLETE,
        every_s: float = 1.0,
    ) -> "Played":
        """A whole exchange; a piece arrives every `every_s` seconds.

        The request is a body or its JSON, or None if its body is not kept.
        """
        whole = request is None or isinstance(request, bytes)
        exchange = self.begin(path, request if whole else json.dumps(request).encode(), headers)
        exchange.routed("chat-0")
        exchange.catch_up()
        got_head = exchange.answered(status, head, ARRIVED_AT_S)
        at_s = ARRIVED_AT_S
        got = []
        for piece in pieces:
            at_s += every_s
            got.append(exchange.chunk(piece, at_s))
        got.append(exchange.ended(ending, at_s + every_s))
        return Played(exchange, b"".join(got), tuple(got), got_head, self.records[-1])


@dataclass(frozen=True, slots=True)
class Played:
    exchange: Exchange
    client_bytes: bytes
    client_pieces: tuple[bytes, ...]
    client_head: RawHeaders
    record: RequestRecord

    @property
    def view(self) -> ProxyView:
        assert self.record.proxied is not None
        return self.record.proxied


def play(
    name: str, pieces: Sequence[bytes] | None = None, setup: Setup | None = None, **options: Any
) -> Played:
    """Play a recorded stream, event by event unless pieces are given."""
    cut = events(recorded(name)) if pieces is None else pieces
    return (setup or Setup()).play(route(name), REQUESTS[name], cut, **options)
