"""Clients of an LLM server's HTTP API that record the bytes sent and received."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import httpx2
from anthropic import Anthropic
from openai import OpenAI

ANSWER_WITHIN_S = 60.0
_KEY = "nobody"
_HEAD = re.compile(rb"HTTP/1\.[01] (\d{3}) ?([^\r\n]*)\r\n((?:[^\r\n]+\r\n)*)\r\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request and its response on the wire, without the framing of their bodies.

    `interim` are the statuses of the responses before the final one.
    """

    method: str
    path: str
    sent: bytes
    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    interim: tuple[int, ...] = ()


class _Recorded(httpx2.SyncByteStream):
    """A body that records the bytes read from it."""

    def __init__(self, stream: httpx2.SyncByteStream) -> None:
        self._stream = stream
        self.pieces: list[bytes] = []

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:
            self.pieces.append(piece)
            yield piece

    def close(self) -> None:
        self._stream.close()


class _Recorder(httpx2.BaseTransport):
    """The transport of both official clients: names each request, and records the last exchange."""

    def __init__(self) -> None:
        self._wire = httpx2.HTTPTransport()
        self._last: tuple[httpx2.Request, httpx2.Response, _Recorded] | None = None
        self.request_id = ""

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["X-Request-Id"] = self.request_id
        request.read()
        response = self._wire.handle_request(request)
        assert isinstance(response.stream, httpx2.SyncByteStream)
        body = _Recorded(response.stream)
        self._last = request, response, body
        return httpx2.Response(
            response.status_code,
            headers=response.headers,
            stream=body,
            extensions=response.extensions,
        )

    def close(self) -> None:
        self._wire.close()

    @property
    def exchange(self) -> Exchange:
        assert self._last is not None, "no request was made"
        request, response, body = self._last
        return Exchange(
            method=request.method,
            path=request.url.path,
            sent=request.content,
            status=response.status_code,
            reason=response.extensions["reason_phrase"].decode(),
            headers=tuple((name.decode(), value.decode()) for name, value in response.headers.raw),
            body=b"".join(body.pieces),
        )


class Clients:
    """One address of a server, and its clients, which send one request at a time."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._recorder = _Recorder()
        http = httpx2.Client(transport=self._recorder, timeout=ANSWER_WITHIN_S)
        self._http = http
        self.openai = OpenAI(base_url=f"{url}/v1", api_key=_KEY, max_retries=0, http_client=http)
        self.anthropic = Anthropic(base_url=url, api_key=_KEY, max_retries=0, http_client=http)
        self._by_curl: Exchange | None = None

    def name_requests(self, request_id: str) -> None:
        """From now on each request carries this X-Request-Id."""
        self._recorder.request_id = request_id
        self._by_curl = None

    @property
    def exchange(self) -> Exchange:
        """The last exchange of these clients."""
        return self._by_curl or self._recorder.exchange

    def curl(
        self, method: str, path: str, *options: str, sent: bytes | None = None, named: bool = True
    ) -> None:
        """Send a request with curl; the body is JSON unless the options differ."""
        arguments = ["curl", "-sS", "-i", "-m", str(ANSWER_WITHIN_S)]
        arguments += ["--head"] if method == "HEAD" else ["--request", method]
        if named:
            arguments += ["-H", f"X-Request-Id: {self._recorder.request_id}"]
        if sent is not None:
            arguments += ["--data-binary", "@-"]
            if not any(option.startswith("Content-Type:") for option in options):
                arguments += ["-H", "Content-Type: application/json"]
        finished = subprocess.run(
            [*arguments, *options, self.url + path],
            input=sent or b"",
            capture_output=True,
            check=True,
        )
        self._by_curl = _read(finished.stdout, method=method, path=path, sent=sent or b"")

    def close(self) -> None:
        """Close the clients."""
        self._http.close()


def _read(output: bytes, *, method: str, path: str, sent: bytes) -> Exchange:
    """The exchange of an output of `curl -i`."""
    interim: list[int] = []
    while True:
        head = _HEAD.match(output)
        assert head is not None, output[:200]
        output = output[head.end() :]
        if not head[1].startswith(b"1"):
            break
        interim.append(int(head[1]))
    lines = [line.split(": ", 1) for line in head[3].decode().splitlines()]
    return Exchange(
        method=method,
        path=path,
        sent=sent,
        status=int(head[1]),
        reason=head[2].decode(),
        headers=tuple((name, value) for name, value in lines),
        body=output,
        interim=tuple(interim),
    )
