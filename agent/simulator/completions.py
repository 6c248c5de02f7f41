"""Response bodies of vLLM 0.32 on the OpenAI routes: chunks of a stream, and whole bodies.

Shapes are those of `vllm/entrypoints/openai/{chat_completion,completion}/{protocol,serving}.py`
and `vllm/entrypoints/serve/engine/protocol.py`. The text repeats one sentence, with one
word or punctuation mark per token.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from agent.simulator.engine_steps import Token

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
    """One response. `include_usage` and `continuous_usage` are the stream options of the client."""

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
            "logprobs": None,
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
