"""What a client asks on the OpenAI routes, and what vLLM 0.32 would refuse of it.

Fields are those of `vllm/entrypoints/openai/{chat_completion,completion}/protocol.py` that bear on
how long an answer takes; all others are ignored. Text is not tokenised: four characters count as
one token.
"""

import math
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from agent.errors import AgentError
from agent.simulator.scenario import Scenario

_CHARACTERS_PER_TOKEN = 4


class RefusalError(AgentError):
    """A request that is not served; `body` is what the client gets to read."""

    def __init__(self, status: HTTPStatus, kind: str, message: str, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": status.value}
        }


class StreamOptions(BaseModel):
    """What a streaming client wants to know beside the tokens."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class CompletionRequest(BaseModel):
    """What both routes understand."""

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
        """How many tokens the client wants at most; None for as many as there is room for."""
        return self.max_tokens


class TextRequest(CompletionRequest):
    """The body of `/v1/completions`: one prompt, as text or as token ids."""

    prompt: str | list[int]
    max_tokens: int | None = Field(default=16, ge=1)

    def prompt_tokens(self) -> int:
        """Ids are counted, text is estimated."""
        if isinstance(self.prompt, str):
            return _estimated_tokens(self.prompt)
        return max(1, len(self.prompt))


class Message(BaseModel):
    """One message of a conversation."""

    content: str | list[dict[str, Any]] | None = None

    def text(self) -> str:
        """Everything written in it; parts that are no text count as nothing."""
        if isinstance(self.content, list):
            return "".join(str(part.get("text") or "") for part in self.content)
        return self.content or ""


class ChatRequest(CompletionRequest):
    """The body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    def prompt_tokens(self) -> int:
        """All messages, estimated."""
        return sum(_estimated_tokens(message.text()) for message in self.messages)

    def token_limit(self) -> int | None:
        """`max_completion_tokens` goes before the older `max_tokens`, as in vLLM."""
        return self.max_completion_tokens or self.max_tokens


RequestT = TypeVar("RequestT", bound=CompletionRequest)


def parsed(kind: type[RequestT], body: bytes, scenario: Scenario) -> RequestT:
    """The request in `body`; raises RefusalError where it cannot be read or is not served."""
    try:
        asked = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        message = f"{error.error_count()} validation error(s); {place or 'body'}: {first['msg']}"
        raise RefusalError(HTTPStatus.BAD_REQUEST, "Bad Request", message, place or None) from error
    _refuse_unserved(asked, scenario)
    return asked


def _refuse_unserved(asked: CompletionRequest, scenario: Scenario) -> None:
    if asked.model and asked.model != scenario.model:
        message = f"The model `{asked.model}` does not exist."
        raise RefusalError(HTTPStatus.NOT_FOUND, "NotFoundError", message, "model")
    if asked.n not in (None, 1):
        message = f"The simulator gives one answer to a request, n={asked.n} was asked."
        raise RefusalError(HTTPStatus.NOT_IMPLEMENTED, "NotImplementedError", message, "n")
    prompt_tokens = asked.prompt_tokens()
    if prompt_tokens >= scenario.max_model_len:
        message = (
            f"This model's maximum context length is {scenario.max_model_len} tokens, "
            f"but the prompt has {prompt_tokens}."
        )
        raise RefusalError(HTTPStatus.BAD_REQUEST, "BadRequestError", message, "input_tokens")


def _estimated_tokens(text: str) -> int:
    return max(1, math.ceil(len(text) / _CHARACTERS_PER_TOKEN))
