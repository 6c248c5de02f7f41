"""Request and response bodies of vLLM 0.32 on the OpenAI routes.

Shapes are those of `vllm/entrypoints/openai/{chat_completion,completion}/{protocol,serving}.py`
and `vllm/entrypoints/serve/engine/protocol.py`. Of a request, fields that do not change the time of
a response are ignored. Four characters of text count as one token. The text of a response repeats
one sentence, with one word or punctuation mark per token."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, Field, ValidationError

from agent.errors import AgentError
from agent.simulator.batching import Token
from agent.simulator.scenario import Scenario

_CHARACTERS_PER_TOKEN = 4


class RefusalError(AgentError):
    """A request that is not served; `body` is the response to the client."""

    def __init__(self, status: HTTPStatus, kind: str, message: str, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": status.value}
        }


class StreamOptions(BaseModel):
    """What a stream contains besides tokens."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class CompletionRequest(BaseModel):
    """The fields of both routes."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    ignore_eos: bool = False

    def prompt_tokens(self) -> int:
        """The length of the prompt."""
        raise NotImplementedError

    def token_limit(self) -> int | None:
        """The client's limit on output tokens; None for no limit."""
        return self.max_tokens

    def alternatives(self) -> int:
        """How many logprobs each token has; only chats have some."""
        return 0


class TextRequest(CompletionRequest):
    """The body of `/v1/completions`: one prompt, as text or as token ids."""

    prompt: str | list[int]
    max_tokens: int | None = Field(default=16, ge=1)

    def prompt_tokens(self) -> int:
        """The number of token ids, or an estimate from the text."""
        if isinstance(self.prompt, str):
            return _estimated_tokens(self.prompt)
        return max(1, len(self.prompt))


class Message(BaseModel):
    """One message of a conversation."""

    content: str | list[dict[str, Any]] | None = None

    def text(self) -> str:
        """Its text, without parts of other kinds."""
        if isinstance(self.content, list):
            return "".join(str(part.get("text") or "") for part in self.content)
        return self.content or ""


class ChatRequest(CompletionRequest):
    """The body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=0, ge=0, le=20)

    def prompt_tokens(self) -> int:
        """An estimate over all messages."""
        return sum(_estimated_tokens(message.text()) for message in self.messages)

    def token_limit(self) -> int | None:
        """`max_completion_tokens` wins over the older `max_tokens`, as in vLLM."""
        return self.max_completion_tokens or self.max_tokens

    def alternatives(self) -> int:
        """How many logprobs each token has."""
        return (self.top_logprobs or 0) if self.logprobs else 0


RequestT = TypeVar("RequestT", bound=CompletionRequest)


def parsed(kind: type[RequestT], body: bytes, scenario: Scenario) -> RequestT:
    """The request in `body`; raises RefusalError if it is invalid or not served."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        message = f"{error.error_count()} validation error(s); {field or 'body'}: {first['msg']}"
        raise RefusalError(HTTPStatus.BAD_REQUEST, "Bad Request", message, field or None) from error
    _refuse_unserved(request, scenario)
    return request


def _refuse_unserved(request: CompletionRequest, scenario: Scenario) -> None:
    if request.model and request.model != scenario.model:
        message = f"The model `{request.model}` does not exist."
        raise RefusalError(HTTPStatus.NOT_FOUND, "NotFoundError", message, "model")
    if request.n not in (None, 1):
        message = f"The simulator returns one choice per request, not n={request.n}."
        raise RefusalError(HTTPStatus.NOT_IMPLEMENTED, "NotImplementedError", message, "n")
    prompt_tokens = request.prompt_tokens()
    if prompt_tokens >= scenario.max_model_len:
        message = (
            f"This model's maximum context length is {scenario.max_model_len} tokens, "
            f"but the prompt has {prompt_tokens}."
        )
        raise RefusalError(HTTPStatus.BAD_REQUEST, "BadRequestError", message, "input_tokens")


def _estimated_tokens(text: str) -> int:
    return max(1, math.ceil(len(text) / _CHARACTERS_PER_TOKEN))


VERSION = "0.32.0+simulated"
FINGERPRINT = f"vllm-{VERSION}"

_SENTENCE = ("This", " answer", " is", " simulated", ";", " no", " model", " wrote", " it", ". ")

Body = dict[str, Any]


def text_of(position: int) -> str:
    """The text of the token at `position`, counted from 1."""
    return _SENTENCE[(position - 1) % len(_SENTENCE)]


def model_card(model: str, max_model_len: int, created: int) -> Body:
    """The entry of a served model on `/v1/models`; `created` in seconds since 1970."""
    permission = {
        "id": f"modelperm-{model}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": model,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [permission],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(ABC):
    """One response. `include_usage` and `continuous_usage` are the stream options of the client.

    Each token of a stream has logprobs of so many `alternatives`.
    """

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]
    whole_object: ClassVar[str]
    unused_in_whole: ClassVar[Sequence[str]] = ()
    unused_in_chunk_usage: ClassVar[Sequence[str]] = ()

    id: str
    created: int
    model: str
    prompt_tokens: int
    include_usage: bool = False
    continuous_usage: bool = False
    alternatives: int = 0

    @property
    def engine_id(self) -> str:
        """The request id in the engine and in its span."""
        return self.id

    def chunks(self, token: Token) -> Iterator[Body]:
        """The chunks of a stream for one token, with those that open and close the stream."""
        if token.is_first:
            for choice, rest in self._opening():
                yield {**self._counted_chunk(choice, 0), **rest}
        choice = self._piece(text_of(token.position), token.finish_reason)
        chunk = self._counted_chunk(choice, token.position)
        closes = token.finish_reason is not None
        if closes and not self.include_usage:
            chunk["system_fingerprint"] = FINGERPRINT
        yield chunk
        if closes and self.include_usage:
            used = {"usage": self._usage(token.position), "system_fingerprint": FINGERPRINT}
            yield {**self._body(self.chunk_object, []), **used}

    def whole(self, last: Token) -> Body:
        """The body of a response without streaming, whose last token is `last`."""
        text = "".join(text_of(position) for position in range(1, last.position + 1))
        details = {"prompt_tokens_details": None, "completion_tokens_details": None}
        return {
            **self._body(self.whole_object, [self._whole_choice(text, last.finish_reason)]),
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": {**self._usage(last.position), **details},
            **dict.fromkeys(self.unused_in_whole),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    @abstractmethod
    def _opening(self) -> Sequence[tuple[Body, Body]]:
        """Choices before the first token, each with the other keys of its chunk."""

    @abstractmethod
    def _piece(self, text: str, finish_reason: str | None) -> Body:
        """The choice in the chunk of one token."""

    @abstractmethod
    def _whole_choice(self, text: str, finish_reason: str | None) -> Body:
        """The choice in a whole body."""

    def _counted_chunk(self, choice: Body, completion_tokens: int) -> Body:
        chunk = self._body(self.chunk_object, [choice])
        if self.continuous_usage:
            unused = dict.fromkeys(self.unused_in_chunk_usage)
            chunk["usage"] = {**self._usage(completion_tokens), **unused}
        return chunk

    def _body(self, kind: str, choices: list[Body]) -> Body:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _usage(self, completion_tokens: int) -> Body:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
        }


def _logprobs(text: str, alternatives: int) -> Body | None:
    """Logprobs of a token in the format of chats; no model computed them."""
    if alternatives == 0:
        return None
    top = [
        {"token": text, "logprob": -float(rank), "bytes": list(text.encode())}
        for rank in range(1, alternatives + 1)
    ]
    return {"content": [{**top[0], "top_logprobs": top}]}


class TextCompletion(Completion):
    """Responses of `/v1/completions`."""

    id_prefix = "cmpl-"
    chunk_object = whole_object = "text_completion"

    @property
    def engine_id(self) -> str:
        """vLLM numbers the prompts of a completion; the simulator has only the first."""
        return f"{self.id}-0"

    def _opening(self) -> Sequence[tuple[Body, Body]]:
        return ()

    def _piece(self, text: str, finish_reason: str | None) -> Body:
        return {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": None,
            "prompt_token_ids": None,
            "token_ids": None,
        }

    def _whole_choice(self, text: str, finish_reason: str | None) -> Body:
        details = {"prompt_logprobs": None, "routed_experts": None}
        return {**self._piece(text, finish_reason), **details}


class ChatCompletion(Completion):
    """Responses of `/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    unused_in_whole = ("prompt_logprobs", "prompt_token_ids", "prompt_text")
    unused_in_chunk_usage = ("completion_tokens_details",)

    def _opening(self) -> Sequence[tuple[Body, Body]]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return ((choice, {"prompt_token_ids": None, "prompt_text": None}),)

    def _piece(self, text: str, finish_reason: str | None) -> Body:
        stopped = {} if finish_reason is None else {"stop_reason": None}
        return {
            "index": 0,
            "delta": {"content": text},
            "logprobs": _logprobs(text, self.alternatives),
            "finish_reason": finish_reason,
            **stopped,
            "token_ids": None,
        }

    def _whole_choice(self, text: str, finish_reason: str | None) -> Body:
        unused = ("refusal", "annotations", "audio", "function_call", "reasoning")
        return {
            "index": 0,
            "message": {"role": "assistant", "content": text, **dict.fromkeys(unused)},
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": None,
            "token_ids": None,
            "routed_experts": None,
        }
