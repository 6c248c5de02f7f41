"""Request bodies on the OpenAI routes, and the requests that vLLM 0.32 would refuse.

Fields are those of `vllm/entrypoints/openai/{chat_completion,completion}/protocol.py` that change
the time of a response; all others are ignored. Four characters of text count as one token.
"""

import math
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from agent.errors import AgentError
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

    def prompt_tokens(self) -> int:
        """An estimate over all messages."""
        return sum(_estimated_tokens(message.text()) for message in self.messages)

    def token_limit(self) -> int | None:
        """`max_completion_tokens` wins over the older `max_tokens`, as in vLLM."""
        return self.max_completion_tokens or self.max_tokens


RequestT = TypeVar("RequestT", bound=CompletionRequest)


def parsed(kind: type[RequestT], body: bytes, scenario: Scenario) -> RequestT:
    """The request in `body`; raises RefusalError if it is invalid or not served."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        message = f"{error.error_count()} validation error(s); {place or 'body'}: {first['msg']}"
        raise RefusalError(HTTPStatus.BAD_REQUEST, "Bad Request", message, place or None) from error
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
