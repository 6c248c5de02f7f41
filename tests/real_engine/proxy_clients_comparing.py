"""Asks the engine directly and by way of the proxy, and compares what clients get."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from tests.real_parts.clients import Door, Exchange
from tests.real_parts.vllm import MODEL

_TIME = re.compile(
    rb'("(?:created|created_at|completed_at|[a-z_]+_ms|tokens_per_second)":)\d+(?:\.\d+)?(?:e-\d+)?'
)
# A random id follows what it is the id of: chatcmpl-, chatcmpl-tool-, resp_, msg_, and the like.
_ID = re.compile(rb"(?<=[a-z][_-])(?:[0-9a-f]{16}){1,2}(?![0-9a-zA-Z])")
# What several tokens in one event make longer; everything else stays as it is.
_TEXTS = {"content", "text", "delta", "arguments", "partial_json", "token"}

_STREAMS = (b"data: ", b"event: ")

Ask = Callable[[Door], Iterable[BaseModel]]


@dataclass(frozen=True, slots=True)
class Case:
    """One request and the status of its response; `varies` matches text that always differs."""

    name: str
    ask: Ask
    status: int = 200
    varies: re.Pattern[bytes] | None = None

    @property
    def request_id(self) -> str:
        """The id of a request of this case, direct or through the proxy."""
        return re.sub(r"[^a-z0-9]+", "-", self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparableResponse:
    """A client's response, comparable: every byte, and the parsed objects."""

    status: int
    reason: str
    interim: tuple[int, ...]
    headers: tuple[tuple[str, str], ...]
    body: bytes
    objects: tuple[str, ...]

    @property
    def comparable(self) -> list[str]:
        """All of it in lines; of a stream the sum, in whichever pieces it came."""
        return [str(self.status), self.reason, str(self.interim), *map(str, self.headers)] + (
            self._sum() if self.body.startswith(_STREAMS) else self._whole()
        )

    def _whole(self) -> list[str]:
        return [*self.body.decode(errors="replace").split("\n"), *self.objects]

    def _sum(self) -> list[str]:
        texts: dict[str, str] = {}
        others: dict[str, set[str]] = {}
        for path, value in (leaf for event in payloads(self.body) for leaf in _leaves(event, "")):
            name = path.rpartition(".")[2]
            if name in _TEXTS and isinstance(value, str):
                texts[path] = texts.get(path, "") + value
            elif ".usage." in path:
                others[path] = {repr(value)}
            elif name != "sequence_number":
                others.setdefault(path, set()).add(repr(value))
        lines = [f"{path}: {text}" for path, text in sorted(texts.items())]
        # With its last tokens in one event a choice has none that is not its end.
        lines += [f"{path}: {sorted(v - {'None'}) or None}" for path, v in sorted(others.items())]
        kinds = {made.partition(" ")[0] for made in self.objects}
        return [*lines, *sorted(kinds), f"compact: {all(map(_is_compact, _events(self.body)))}"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The responses of one case on both ways, and the exchange through the proxy with its id."""

    direct: ComparableResponse
    proxied: ComparableResponse
    request_id: str
    exchange: Exchange


def compare(case: Case, engine: Door, proxy: Door) -> Comparison:
    """Send the request to the proxy, and then to the engine itself."""
    proxied = _hear(case, proxy)
    exchange = proxy.exchange
    return Comparison(
        direct=_hear(case, engine),
        proxied=proxied,
        request_id=_response_id(exchange) or case.request_id,
        exchange=exchange,
    )


def payloads(body: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects of an response, be it one or a stream of them."""
    for text in _events(body) or [body]:
        try:
            payload = json.loads(text)
        except ValueError:
            continue
        if isinstance(payload, dict):
            yield payload


def _events(body: bytes) -> list[bytes]:
    """The data of each event of a stream."""
    return [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]


def _is_compact(event: bytes) -> bool:
    """Whether it is written as the engine writes JSON: without spaces."""
    try:
        value = json.loads(event)
    except ValueError:
        return True
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() == event


def _response_id(exchange: Exchange) -> str | None:
    """The id in the engine's response, without the prefix of its kind."""
    found = re.search(rb'"id":"(?:chatcmpl|cmpl)-([^"]+)"', exchange.body)
    return found[1].decode() if found else None


def _hear(case: Case, door: Door) -> ComparableResponse:
    door.name_requests(case.request_id)
    objects = [_written(made).encode() for made in _made(case, door)]
    exchange = door.exchange
    comparable = _Comparable(case.request_id, case.varies)
    body, *objects = [comparable(text) for text in (exchange.body, *objects)]
    shorter = len(exchange.body) - len(body)
    return ComparableResponse(
        status=exchange.status,
        reason=exchange.reason,
        interim=exchange.interim,
        headers=tuple(_header(door, name, value, shorter) for name, value in exchange.headers),
        body=body,
        objects=tuple(made.decode() for made in objects),
    )


def _made(case: Case, door: Door) -> list[BaseModel | Exception]:
    """The objects that the client parses, and the error that it raises."""
    made: list[BaseModel | Exception] = []
    try:
        made.extend(case.ask(door))
    except Exception as error:
        made.append(error)
    return made


def _written(made: BaseModel | Exception) -> str:
    if isinstance(made, BaseModel):
        return f"{type(made).__name__} {made.model_dump_json(warnings=False)}"
    return f"{type(made).__name__} {made} {getattr(made, 'body', None)}"


class _Comparable:
    """Makes texts about one request comparable: each id becomes its place among those seen."""

    def __init__(self, request_id: str, varies: re.Pattern[bytes] | None) -> None:
        self._request_id = request_id.encode()
        self._varies = varies
        self._seen: dict[bytes, bytes] = {}

    def __call__(self, text: bytes) -> bytes:
        if self._varies is not None:
            # A number, so that JSON stays JSON.
            text = self._varies.sub(b"0", text)
        text = _TIME.sub(rb"\g<1>0", text.replace(self._request_id, b"~"))
        return _ID.sub(self._place, text)

    def _place(self, found: re.Match[bytes]) -> bytes:
        return self._seen.setdefault(found[0], b"~%d" % len(self._seen))


def _header(door: Door, name: str, value: str, shorter: int) -> tuple[str, str]:
    if name == "date":
        return name, "~"
    if name == "content-length" and int(value):
        return name, str(int(value) - shorter)
    return name, value.replace(door.url, "http://here")


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Every value by the names above it; in place of its position a choice has its index."""
    if isinstance(value, dict):
        index = f"[{value['index']}]" if "index" in value else ""
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}{index}.{name}")
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, path)
    else:
        yield path, value


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"

ASKED = "bacade dofuga"
TALK = [{"role": "system", "content": "lamuno"}, {"role": "user", "content": ASKED}]
# Without sampling, random weights produce much the same token at every step.
DRAWN = {"temperature": 0.8, "seed": 7}
EXACT = {"temperature": 0, "seed": 7}
CITIES = {
    "type": "object",
    "properties": {"c": {"type": "string", "enum": ["a", "b"]}},
    "required": ["c"],
    "additionalProperties": False,
}
_ABOUT = {"name": "f", "description": "of a city"}
TOOL = {"type": "function", "function": {**_ABOUT, "parameters": CITIES, "strict": True}}
FLAT_TOOL = {"type": "function", **_ABOUT, "parameters": CITIES, "strict": True}
MESSAGES_TOOL = {**_ABOUT, "input_schema": CITIES}
# Otherwise random weights may put spaces for ever where a grammar allows them.
NO_ENDLESS_SPACES = {"frequency_penalty": 2}


class City(BaseModel):
    """The type of a structured response."""

    c: Literal["a", "b"]


# A method of a client. They are generated, with a type for each way to call them.
Method = Callable[[Door], Any]


def official(method: Method, **usual: Any) -> Callable[..., Ask]:
    """Makes requests of an official client; each has the keys of `usual` and more."""

    def asking(**more: Any) -> Ask:
        return lambda door: _objects(method(door)(**{**usual, **more}))

    return asking


def _objects(response: Any) -> Iterator[BaseModel]:
    yield from [response] if isinstance(response, BaseModel) else response


def helped(method: Method, final: str, **keys: Any) -> Ask:
    """A client's own reading of a stream, and by `final` the response that it puts together."""

    def ask(door: Door) -> Iterator[BaseModel]:
        with method(door)(**keys) as stream:
            yield from stream
            yield getattr(stream, final)()

    return ask


_CHAT = {"model": MODEL, "messages": TALK, "max_tokens": 8, **EXACT}
_RESPONSE = {"model": MODEL, "input": ASKED, "max_output_tokens": 8, "temperature": 0}
_MESSAGE = {"model": MODEL, "messages": TALK[1:], "max_tokens": 8, "extra_body": {"temperature": 0}}
_REQUIRED = {"max_tokens": 140, "tools": [TOOL], "tool_choice": "required", **NO_ENDLESS_SPACES}

chat = official(lambda door: door.openai.chat.completions.create, **_CHAT)
completions = official(
    lambda door: door.openai.completions.create, model=MODEL, prompt=ASKED, max_tokens=8, **EXACT
)
responses = official(lambda door: door.openai.responses.create, **_RESPONSE)
messages = official(lambda door: door.anthropic.messages.create, **_MESSAGE)
models = official(lambda door: door.openai.models.list)
token_count = official(
    lambda door: door.anthropic.messages.count_tokens, model=MODEL, messages=TALK[1:]
)
chat_parsed = official(
    lambda door: door.openai.chat.completions.parse,
    **{**_CHAT, "max_tokens": 40, "response_format": City},
)
chat_helped = helped(
    lambda door: door.openai.chat.completions.stream,
    "get_final_completion",
    **{**_CHAT, **_REQUIRED},
)
responses_helped = helped(
    lambda door: door.openai.responses.stream, "get_final_response", **_RESPONSE
)
messages_helped = helped(
    lambda door: door.anthropic.messages.stream, "get_final_message", **_MESSAGE
)


def curl(method: str, path: str, *options: str, **keys: Any) -> Ask:
    """Any request with curl; the keywords are its JSON body."""
    sent = json.dumps(keys).encode() if keys else None
    return curl_bytes(method, path, *options, sent=sent)


def curl_bytes(
    method: str, path: str, *options: str, sent: bytes | None, named: bool = True
) -> Ask:
    """Any request with curl and any body."""

    def ask(door: Door) -> Iterable[BaseModel]:
        door.curl(method, path, *options, sent=sent, named=named)
        return ()

    return ask
