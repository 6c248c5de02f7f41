"""Requests of clients, sent once to the engine and once through the proxy."""

import json
import re
from gzip import compress
from itertools import starmap
from typing import Any

from tests.real_engine.proxy_clients_comparing import (
    ASKED,
    CHAT,
    CITIES,
    COMPLETIONS,
    DRAWN,
    EXACT,
    FLAT_TOOL,
    MESSAGES,
    MESSAGES_TOOL,
    NO_ENDLESS_SPACES,
    RESPONSES,
    TALK,
    TOOL,
    Ask,
    Case,
    chat,
    chat_helped,
    chat_parsed,
    completions,
    curl,
    curl_bytes,
    messages,
    messages_helped,
    models,
    responses,
    responses_helped,
    token_count,
)
from tests.real_parts.vllm import MODEL

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
SCHEMA = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": CITIES, "strict": True},
    },
    "max_tokens": 40,
}
FORMAT = {"type": "json_schema", "name": "city", "schema": CITIES, "strict": True}
CHOICE = {"extra_body": {"structured_outputs": {"choice": ["bacade", "dofuga"]}}}
PATTERN = {"extra_body": {"structured_outputs": {"regex": "[a-c]{4}"}}}
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
    ("chat streamed with no options", chat(stream=True, stream_options=None)),
    ("chat drawn", chat(**DRAWN)),
    ("chat drawn streamed", chat(**DRAWN, stream=True, max_tokens=24)),
    ("chat two choices", chat(**TWO)),
    ("chat two choices streamed", chat(**TWO, stream=True)),
    ("chat two choices streamed with usage", chat(**TWO, **COUNTED)),
    ("chat three choices with logprobs streamed", chat(**THREE, stream=True), 200, LOG_PROBABILITY),
    ("chat logprobs", chat(logprobs=True, top_logprobs=3)),
    ("chat logprobs streamed", chat(logprobs=True, top_logprobs=3, stream=True)),
    ("chat token ids streamed", chat(**TOKEN_IDS, stream=True)),
    ("chat one token streamed", chat(max_tokens=1, stream=True)),
    ("chat stop streamed", chat(**DRAWN, stop=["a"], max_tokens=40, stream=True)),
    ("chat echo streamed", chat(extra_body={"echo": True}, stream=True)),
    ("chat any tool streamed", chat(tools=[TOOL], stream=True)),
    ("chat required tool streamed", chat(**REQUIRED, stream=True)),
    ("chat named tool", chat(**NAMED)),
    ("chat named tool streamed", chat(**NAMED, stream=True)),
    ("chat schema", chat(**SCHEMA)),
    ("chat schema streamed", chat(**SCHEMA, stream=True)),
    ("chat parsed", chat_parsed()),
    ("chat choice", chat(**CHOICE)),
    ("chat pattern streamed", chat(**PATTERN, stream=True)),
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
    ("completions logprobs", completions(logprobs=2)),
    ("completions logprobs streamed", completions(logprobs=2, stream=True)),
    ("completions echo streamed", completions(echo=True, stream=True)),
    ("responses", responses()),
    ("responses streamed", responses(stream=True)),
    ("responses with instructions", responses(instructions="lamuno", user="zevu")),
    ("responses named tool", responses(**FLAT_NAMED)),
    ("responses required tool streamed", responses(**FLAT_REQUIRED, stream=True)),
    ("responses schema", responses(text={"format": FORMAT}, max_output_tokens=40)),
    ("responses helper", responses_helped),
    ("messages", messages()),
    ("messages streamed", messages(stream=True)),
    ("messages with a system", messages(system="lamuno", stream=True)),
    ("messages tool", messages(**ANY_TOOL)),
    ("messages tool streamed", messages(**ANY_TOOL, stream=True)),
    ("messages stop", messages(stop_sequences=["e"], max_tokens=24)),
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
    ("completions unknown model", completions(model="unknown", stream=True), 404),
    ("responses unknown model", responses(model="unknown"), 404),
    ("messages unknown model", messages(model="unknown", stream=True), 404),
    ("chat bad parameter", chat(**BAD), 400),
    ("chat bad parameter streamed", chat(**BAD, stream=True), 400),
    ("completions bad parameter", completions(max_tokens=-1, stream=True), 400),
    ("responses bad parameter", responses(max_output_tokens="many"), 400),
    ("messages bad parameter", messages(max_tokens=0), 400),
    ("chat too long", chat(messages=TOO_LONG), 400),
    ("chat too long streamed", chat(messages=TOO_LONG, stream=True), 400),
    ("completions too long streamed", completions(prompt=LONG, stream=True), 400),
    ("responses too long streamed", responses(input=LONG, stream=True), 400),
    ("messages too long streamed", messages(messages=TOO_LONG, stream=True), 400),
    ("chat no choices", chat(n=0, stream=True), 400),
    ("chat two greedy choices", chat(n=2, stream=True), 400),
    ("chat options without a stream", chat(stream_options={"include_usage": True}), 400),
    ("chat options of no kind", chat(stream=True, stream_options="all"), 400),
    ("chat option of no kind", chat(stream=True, stream_options={"include_usage": "so"}), 400),
    ("chat without messages", chat(messages=[], stream=True), 400),
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
    ("ping", curl("POST", "/ping")),
    ("version", curl("GET", "/version")),
    ("load", curl("GET", "/load")),
    ("tokenize", curl("POST", "/tokenize", model=MODEL, prompt=ASKED)),
    ("detokenize", curl("POST", "/detokenize", model=MODEL, tokens=[300, 301])),
    ("count of tokens", token_count()),
    ("openapi", curl("GET", "/openapi.json", "--compressed")),
    ("head of models", curl("HEAD", "/v1/models"), 405),
    ("head of chat", curl("HEAD", CHAT), 405),
    ("head of metrics", curl("HEAD", "/metrics"), 200, SAMPLE),
    ("metrics", curl("GET", "/metrics"), 200, SAMPLE),
    ("preflight", curl("OPTIONS", CHAT, *ORIGIN, *FOR_POST)),
    ("preflight from elsewhere", curl("OPTIONS", CHAT, *OTHER_ORIGIN, *FOR_POST), 400),
    ("unknown path", curl("GET", "/v1/nothing"), 404),
    ("unknown path posted", curl("POST", "/v1/nothing", **ASKING), 404),
    ("two slashes", curl("POST", f"/{CHAT}", **ASKING), 404),
    ("slash at the end", curl("POST", f"{CHAT}/", **ASKING), 307),
    ("chat got", curl("GET", CHAT), 405),
    ("chat put", curl("PUT", CHAT, **ASKING), 405),
    ("models deleted", curl("DELETE", "/v1/models"), 405),
    ("unknown response", curl("GET", "/v1/responses/resp_unknown"), 404),
    ("models patched", curl("PATCH", "/v1/models"), 405),
    ("strange method", curl("PROPFIND", "/v1/models"), 405),
)

# Each choice ends with the engine's fingerprint, of which the proxy has seen nothing before.
FIRST = Case("first of all", chat(**{**TWO, "max_tokens": 1}, stream=True))
CASES = tuple(starmap(Case, (*MEASURED, *BY_CURL, *REFUSED, *ELSEWHERE)))
