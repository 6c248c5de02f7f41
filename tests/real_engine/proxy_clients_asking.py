"""Requests of each client: the official ones for Python, and curl."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from pydantic import BaseModel

from tests.real_engine.proxy_clients_comparing import Ask
from tests.real_parts.clients import Door
from tests.real_parts.vllm import MODEL

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
