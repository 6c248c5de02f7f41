"""Clients of an engine, quick and slow ones, that ask what the tests of causes need."""

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from random import Random
from threading import Event, Lock
from typing import Any
from urllib.parse import urlsplit

from tests.real_parts.vllm import ANSWER_WITHIN_S

# Token ids that the tiny model's tokenizer has.
_IDS = range(100, 1900)
# Of a usual prompt the prefix cache has nearly all: seven blocks of 128 tokens.
_PREFIX = [Random(0).choice(_IDS) for _ in range(900)]
USUAL_PROMPT, USUAL_OUTPUT = 1000, 12
# Prompts of a middle length show what a prompt token takes.
_NEW, _NEW_PROMPT = 0.15, 400
_PAUSE_S = 0.3
# A network has smaller segments than loopback, for which the kernel would buffer megabytes.
_SEGMENT, _RECEIVE_BUFFER = 1400, 4096
_NEVER = Event()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client saw of one response, in seconds."""

    ttft_s: float
    tpot_s: float


class Traffic:
    """Clients of one engine, perhaps behind a proxy. `asked` counts their requests by name."""

    def __init__(self, url: str, model: str) -> None:
        self.asked: Counter[str] = Counter()
        self._place = urlsplit(url).netloc
        self._model = model
        self._random = Random(0)
        self._lock = Lock()

    def new_prompt(self, tokens: int) -> list[int]:
        """A prompt that no cache has."""
        return [self._random.choice(_IDS) for _ in range(tokens)]

    def usual_prompt(self) -> list[int]:
        """A prompt of which the prefix cache has nearly all."""
        return _PREFIX + self.new_prompt(USUAL_PROMPT - len(_PREFIX))

    def ask(self, name: str, prompt: list[int], tokens: int, **fields: Any) -> Asked:
        """One streamed completion, read to its end; its id begins with the name."""
        head, body = self._request(name, {"prompt": prompt, "max_tokens": tokens, **fields})
        connection = HTTPConnection(self._place, timeout=ANSWER_WITHIN_S)
        began_s = time.monotonic()
        connection.request("POST", "/v1/completions", body, head)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.read(1)
        first_s = time.monotonic()
        while response.read1(65536):
            pass
        ended_s = time.monotonic()
        connection.close()
        return Asked(first_s - began_s, (ended_s - first_s) / max(1, tokens - 1))

    def chat_slowly(self, name: str, asked: Mapping[str, Any], stall_s: float) -> None:
        """One streamed chat whose client stops to read for a while after the first bytes."""
        host, port = self._place.split(":")
        head, body = self._request(name, asked)
        head |= {"Host": self._place, "Content-Length": str(len(body)), "Connection": "close"}
        lines = "".join(f"{key}: {value}\r\n" for key, value in head.items())
        with socket.socket() as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
            client.settimeout(ANSWER_WITHIN_S)
            client.connect((host, int(port)))
            client.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{lines}\r\n".encode() + body)
            assert client.recv(1024).startswith(b"HTTP/1.1 200")
            _NEVER.wait(stall_s)
            while client.recv(65536):
                pass

    def _request(self, name: str, asked: Mapping[str, Any]) -> tuple[dict[str, str], bytes]:
        """The headers and the body of a request; no two have one id."""
        with self._lock:
            self.asked[name] += 1
            request_id = f"{name}-{self.asked[name]}"
        body = {"model": self._model, "stream": True, "ignore_eos": True, **asked}
        head = {"X-Request-Id": request_id, "Content-Type": "application/json"}
        return head, json.dumps(body).encode()


def at_once(count: int, ask: Callable[[int], object], *, apart_s: float = 0.0) -> None:
    """Call `ask` with each number, each in a thread of its own, which start a little apart."""

    def begin(number: int) -> None:
        _NEVER.wait(apart_s * number)
        ask(number)

    with ThreadPoolExecutor(count) as clients:
        list(clients.map(begin, range(count)))


def for_a_while(
    for_s: float,
    clients: int,
    ask: Callable[[], Asked],
    *,
    pause_s: float = 0.0,
    at_least: int = 1,
    apart_s: float = 0.0,
) -> list[Asked]:
    """Each of several clients calls `ask` again and again, as long and as often as is said."""
    until = time.monotonic() + for_s
    answered: list[Asked] = []

    def client(_: int) -> None:
        while time.monotonic() < until or len(answered) < at_least:
            answered.append(ask())
            _NEVER.wait(pause_s)

    at_once(clients, client, apart_s=apart_s)
    return answered


def usual(
    traffic: Traffic, for_s: float, name: str = "usual", *, clients: int = 4, at_least: int = 1
) -> list[Asked]:
    """Prompts that the prefix cache has, with a few tokens of output; some prompts are new."""

    def ask() -> Asked:
        new = Random().random() < _NEW
        prompt = traffic.new_prompt(_NEW_PROMPT) if new else traffic.usual_prompt()
        return traffic.ask(name, prompt, USUAL_OUTPUT)

    return for_a_while(for_s, clients, ask, pause_s=_PAUSE_S, at_least=at_least)


def short(
    traffic: Traffic, for_s: float, name: str = "usual", *, clients: int = 4, longer: float = 0.0
) -> list[Asked]:
    """Short prompts, which no cache has, with a few tokens of output; some are longer."""

    def ask() -> Asked:
        tokens = _NEW_PROMPT if Random().random() < longer else 16
        return traffic.ask(name, traffic.new_prompt(tokens), USUAL_OUTPUT)

    return for_a_while(for_s, clients, ask, pause_s=_PAUSE_S)
