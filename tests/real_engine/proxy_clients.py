"""Requests to the engine, directly and by way of the proxy, and what clients get of both."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from gzip import compress
from itertools import starmap
from typing import Any

from pydantic import BaseModel

from tests.real_parts.clients import Clients, Exchange
from tests.real_parts.engine_server import MODEL

_TIME = re.compile(
    rb'("(?:created|created_at|completed_at|[a-z_]+_ms|tokens_per_second)":)\d+(?:\.\d+)?(?:e-\d+)?'
)
# A random id follows what it is the id of: chatcmpl-, chatcmpl-tool-, resp_, msg_, and the like.
_ID = re.compile(rb"(?<=[a-z][_-])(?:[0-9a-f]{16}){1,2}(?![0-9a-zA-Z])")
# What several tokens in one event make longer; everything else stays as it is.
_TEXTS = {"content", "text", "delta", "arguments", "partial_json", "token"}

_STREAMS = (b"data: ", b"event: ")

Ask = Callable[[Clients], Iterable[BaseModel]]


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


def compare(case: Case, engine: Clients, proxy: Clients) -> Comparison:
    """Send the request to the proxy, and then to the engine itself."""
    proxied = hear(case, proxy)
    exchange = proxy.exchange
    return Comparison(
        direct=hear(case, engine),
        proxied=proxied,
        request_id=response_id_of(exchange) or case.request_id,
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


def response_id_of(exchange: Exchange) -> str | None:
    """The id in the engine's response, without the prefix of its kind."""
    found = re.search(rb'"id":"(?:chatcmpl|cmpl)-([^"]+)"', exchange.body)
    return found[1].decode() if found else None


def hear(case: Case, clients: Clients) -> ComparableResponse:
    """Send the request, and return what the client got."""
    clients.name_requests(case.request_id)
    objects = [_written(made).encode() for made in _made(case, clients)]
    exchange = clients.exchange
    comparable = _Comparable(case.request_id, case.varies)
    body, *objects = [comparable(text) for text in (exchange.body, *objects)]
    shorter = len(exchange.body) - len(body)
    return ComparableResponse(
        status=exchange.status,
        reason=exchange.reason,
        interim=exchange.interim,
        headers=tuple(_header(clients, name, value, shorter) for name, value in exchange.headers),
        body=body,
        objects=tuple(made.decode() for made in objects),
    )


def _made(case: Case, clients: Clients) -> list[BaseModel | Exception]:
    """The objects that the client parses, and the error that it raises."""
    made: list[BaseModel | Exception] = []
    try:
        made.extend(case.ask(clients))
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


def _header(clients: Clients, name: str, value: str, shorter: int) -> tuple[str, str]:
    if name == "date":
        return name, "~"
    if name == "content-length" and int(value):
        return name, str(int(value) - shorter)
    return name, value.replace(clients.url, "http://here")


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


# A method of a client. They are generated, with a type for each way to call them.
Method = Callable[[Clients], Any]


def official(method: Method, **usual: Any) -> Callable[..., Ask]:
    """Makes requests of an official client; each has the keys of `usual` and more."""

    def asking(**more: Any) -> Ask:
        return lambda clients: _objects(method(clients)(**{**usual, **more}))

    return asking


def _objects(response: Any) -> Iterator[BaseModel]:
    yield from [response] if isinstance(response, BaseModel) else response


def helped(method: Method, final: str, **keys: Any) -> Ask:
    """A client's own reading of a stream, and by `final` the response that it puts together."""

    def ask(clients: Clients) -> Iterator[BaseModel]:
        with method(clients)(**keys) as stream:
            yield from stream
            yield getattr(stream, final)()

    return ask


_CHAT = {"model": MODEL, "messages": TALK, "max_tokens": 8, **EXACT}
_RESPONSE = {"model": MODEL, "input": ASKED, "max_output_tokens": 8, "temperature": 0}
_MESSAGE = {"model": MODEL, "messages": TALK[1:], "max_tokens": 8, "extra_body": {"temperature": 0}}
_REQUIRED = {"max_tokens": 140, "tools": [TOOL], "tool_choice": "required", **NO_ENDLESS_SPACES}

chat = official(lambda clients: clients.openai.chat.completions.create, **_CHAT)
completions = official(
    lambda clients: clients.openai.completions.create,
    model=MODEL,
    prompt=ASKED,
    max_tokens=8,
    **EXACT,
)
responses = official(lambda clients: clients.openai.responses.create, **_RESPONSE)
messages = official(lambda clients: clients.anthropic.messages.create, **_MESSAGE)
models = official(lambda clients: clients.openai.models.list)
chat_helped = helped(
    lambda clients: clients.openai.chat.completions.stream,
    "get_final_completion",
    **{**_CHAT, **_REQUIRED},
)
responses_helped = helped(
    lambda clients: clients.openai.responses.stream, "get_final_response", **_RESPONSE
)
messages_helped = helped(
    lambda clients: clients.anthropic.messages.stream, "get_final_message", **_MESSAGE
)


def curl(method: str, path: str, *options: str, **keys: Any) -> Ask:
    """Any request with curl; the keywords are its JSON body."""
    sent = json.dumps(keys).encode() if keys else None
    return curl_bytes(method, path, *options, sent=sent)


def curl_bytes(
    method: str, path: str, *options: str, sent: bytes | None, named: bool = True
) -> Ask:
    """Any request with curl and any body."""

    def ask(clients: Clients) -> Iterable[BaseModel]:
        clients.curl(method, path, *options, sent=sent, named=named)
        return ()

    return ask


ALLOWED_ORIGIN = "http://somewhere"
COUNTED = {"stream": True, "stream_options": {"include_usage": True}}
EACH_COUNTED = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
NOT_COUNTED = {"stream": True, "stream_options": {"include_usage": False}}
# Few tokens, because the engine orders several choices at random at each token.
TWO = {**DRAWN, "n": 2, "max_tokens": 3}
THREE = {**DRAWN, "n": 3, "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
REQUIRED = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 140, **NO_ENDLESS_SPACES}
NAMED = {**REQUIRED, "tool_choice": {"type": "function", "function": {"name": "f"}}}
FLAT_REQUIRED = {
    "tools": [FLAT_TOOL],
    "tool_choice": "required",
    "max_output_tokens": 140,
    "extra_body": NO_ENDLESS_SPACES,
}
FLAT_NAMED = {**FLAT_REQUIRED, "tool_choice": {"type": "function", "name": "f"}}
ANY_TOOL = {
    "messages": [{"role": "user", "content": "hogonu bari"}],
    "tools": [MESSAGES_TOOL],
    "tool_choice": {"type": "any"},
    "max_tokens": 120,
}
TOKEN_IDS = {"extra_body": {"return_token_ids": True}}
LONG = "bacade " * 3000
TOO_LONG = [{"role": "user", "content": LONG}]
BRIEF_COMPLETION = {"prompt": ASKED, "max_tokens": 6, "temperature": 0, "stream": True}
BRIEF_RESPONSE = {"input": ASKED, "max_output_tokens": 6, "temperature": 0, "stream": True}
BRIEF_MESSAGE = {"messages": TALK[1:], "max_tokens": 6, "temperature": 0, "stream": True}
# The values of a metrics page, and what happened to be counted first.
SAMPLE = re.compile(rb"(?m)^[^#\n].*\n?")
# Its last digits depend on which choices the engine computes in one step.
LOG_PROBABILITY = re.compile(rb'(?<="logprob":)-?\d+\.\d+')

MEASURED = (
    ("chat", chat()),
    ("chat streamed", chat(stream=True)),
    ("chat streamed with usage", chat(**COUNTED)),
    ("chat streamed with usage in each event", chat(**EACH_COUNTED)),
    ("chat streamed without usage", chat(**NOT_COUNTED)),
    ("chat two choices", chat(**TWO)),
    ("chat two choices streamed", chat(**TWO, stream=True)),
    ("chat two choices streamed with usage", chat(**TWO, **COUNTED)),
    ("chat three choices with logprobs streamed", chat(**THREE, stream=True), 200, LOG_PROBABILITY),
    ("chat logprobs streamed", chat(logprobs=True, top_logprobs=3, stream=True)),
    ("chat token ids streamed", chat(**TOKEN_IDS, stream=True)),
    ("chat one token streamed", chat(max_tokens=1, stream=True)),
    ("chat required tool streamed", chat(**REQUIRED, stream=True)),
    ("chat named tool", chat(**NAMED)),
    ("chat named tool streamed", chat(**NAMED, stream=True)),
    ("chat helper", chat_helped),
    ("completions", completions()),
    ("completions streamed", completions(stream=True)),
    ("completions streamed with usage", completions(**COUNTED)),
    ("completions streamed with usage in each event", completions(**EACH_COUNTED)),
    ("completions streamed without usage", completions(**NOT_COUNTED)),
    ("completions two choices streamed", completions(**TWO, stream=True)),
    ("completions two prompts", completions(prompt=["bacade", "dofuga"])),
    (
        "completions two prompts streamed",
        completions(prompt=["ba", "do"], max_tokens=1, stream=True),
    ),
    ("completions tokens for a prompt", completions(prompt=[300, 301, 302], stream=True)),
    ("completions logprobs streamed", completions(logprobs=2, stream=True)),
    ("responses", responses()),
    ("responses streamed", responses(stream=True)),
    ("responses named tool", responses(**FLAT_NAMED)),
    ("responses required tool streamed", responses(**FLAT_REQUIRED, stream=True)),
    ("responses helper", responses_helped),
    ("messages", messages()),
    ("messages streamed", messages(stream=True)),
    ("messages tool", messages(**ANY_TOOL)),
    ("messages tool streamed", messages(**ANY_TOOL, stream=True)),
    ("messages stop streamed", messages(stop_sequences=["e"], max_tokens=24, stream=True)),
    ("messages helper", messages_helped),
)

ASKING = {"model": MODEL, "messages": TALK, "max_tokens": 6, **EXACT}
STREAM = {**ASKING, "stream": True}
FOREIGN = [{"role": "user", "content": 'Grüße 東京 🚕 \u2028 \\ " </s>'}]
STREAM_BODY = json.dumps(STREAM).encode()
SPACED_BODY = json.dumps({**STREAM, "messages": FOREIGN}, indent=2).encode()
UNICODE_BODY = json.dumps({**STREAM, "messages": FOREIGN}, ensure_ascii=False).encode()
ORIGIN = ("-H", f"Origin: {ALLOWED_ORIGIN}")
OTHER_ORIGIN = ("-H", "Origin: http://elsewhere")
FOR_POST = ("-H", "Access-Control-Request-Method: POST")
# Larger than the proxy's limit of a held body, so it is relayed in pieces.
HUGE = "u" * (33 * 1024 * 1024)


def ask(*options: str, **more: Any) -> Ask:
    """Chat completions with curl."""
    return curl("POST", CHAT, *options, **{**ASKING, **more})


def ask_with(body: bytes, *options: str) -> Ask:
    """Chat completions with curl and just this body."""
    return curl_bytes("POST", CHAT, *options, sent=body)


BY_CURL = (
    ("curl", ask()),
    ("curl streamed", ask(stream=True)),
    (
        "curl without a name",
        curl_bytes("POST", CHAT, sent=json.dumps(ASKING).encode(), named=False),
    ),
    ("curl completions streamed", curl("POST", COMPLETIONS, model=MODEL, **BRIEF_COMPLETION)),
    ("curl responses streamed", curl("POST", RESPONSES, model=MODEL, **BRIEF_RESPONSE)),
    ("curl messages streamed", curl("POST", MESSAGES, model=MODEL, **BRIEF_MESSAGE)),
    ("curl usage null", ask(stream=True, stream_options={"include_usage": None})),
    ("curl each usage alone", ask(stream=True, stream_options={"continuous_usage_stats": True})),
    ("curl stream by number", ask(stream=1)),
    ("curl written with spaces", ask_with(SPACED_BODY)),
    ("curl written in unicode", ask_with(UNICODE_BODY)),
    ("curl a member twice", ask_with(STREAM_BODY[:-1] + b', "max_tokens": 3}')),
    ("curl gzip wished", ask("-H", "Accept-Encoding: gzip")),
    ("curl gzip wished streamed", ask("--compressed", stream=True)),
    ("curl http 1.0", ask("--http1.0")),
    ("curl http 1.0 streamed", ask("--http1.0", stream=True)),
    ("curl chunked", ask("-H", "Transfer-Encoding: chunked", stream=True)),
    ("curl closing", ask("-H", "Connection: close", stream=True)),
    ("curl expecting", ask("-H", "Expect: 100-continue")),
    ("curl cross origin", ask(*ORIGIN, stream=True)),
    ("curl query", curl("POST", f"{CHAT}?a=b&c", **STREAM)),
    ("curl escaped path", curl("POST", "/v1/chat/%63ompletions", **STREAM)),
    ("curl large", ask(stream=True, user="u" * 3_000_000)),
    ("curl huge", ask(user=HUGE)),
)

BAD = {"temperature": "hot"}

REFUSED = (
    ("chat unknown model", chat(model="unknown"), 404),
    ("chat unknown model streamed", chat(model="unknown", stream=True), 404),
    ("chat too long streamed", chat(messages=TOO_LONG, stream=True), 400),
    ("messages too long streamed", messages(messages=TOO_LONG, stream=True), 400),
    ("chat no choices", chat(n=0, stream=True), 400),
    ("chat options of no kind", chat(stream=True, stream_options="all"), 400),
    ("chat option of no kind", chat(stream=True, stream_options={"include_usage": "so"}), 400),
    ("responses after an unknown one", responses(previous_response_id="resp_unknown"), 404),
    ("curl malformed", ask_with(b'{"model": "tiny-llama", "messages": [}'), 400),
    ("curl cut off", ask_with(STREAM_BODY[:-1]), 400),
    ("curl a list", ask_with(b"[1, 2]"), 400),
    ("curl no body", ask_with(b""), 400),
    ("curl no text", ask_with(b'{"stream": true, "model": "\xff"}'), 400),
    ("curl as text", ask_with(STREAM_BODY, "-H", "Content-Type: text/plain"), 400),
    ("curl gzip sent", ask_with(compress(STREAM_BODY), "-H", "Content-Encoding: gzip"), 400),
    ("curl bad all over", ask(**BAD, stream=True, n="two", messages=3), 400),
)

ELSEWHERE = (
    ("models", models()),
    ("health", curl("GET", "/health")),
    ("openapi", curl("GET", "/openapi.json", "--compressed")),
    ("head of models", curl("HEAD", "/v1/models"), 405),
    ("metrics", curl("GET", "/metrics"), 200, SAMPLE),
    ("preflight", curl("OPTIONS", CHAT, *ORIGIN, *FOR_POST)),
    ("preflight from elsewhere", curl("OPTIONS", CHAT, *OTHER_ORIGIN, *FOR_POST), 400),
    ("unknown path", curl("GET", "/v1/nothing"), 404),
    ("two slashes", curl("POST", f"/{CHAT}", **ASKING), 404),
    ("slash at the end", curl("POST", f"{CHAT}/", **ASKING), 307),
    ("chat got", curl("GET", CHAT), 405),
    ("strange method", curl("PROPFIND", "/v1/models"), 405),
)

# Each choice ends with the engine's fingerprint, of which the proxy has seen nothing before.
FIRST = Case("first of all", chat(**{**TWO, "max_tokens": 1}, stream=True))
CASES = tuple(starmap(Case, (*MEASURED, *BY_CURL, *REFUSED, *ELSEWHERE)))
