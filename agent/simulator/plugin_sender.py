"""What `goodput-agent-vllm`, the agent's plugin in vLLM, reports of a simulated engine.

The datagrams are those of `plugins/vllm/goodput_agent_vllm/datagrams.py`.
"""

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable

from agent.records.engine import EndedRequest, EngineStep
from agent.simulator.batching import Finished, Step

PATH_VARIABLE = "GOODPUT_AGENT_SOCKET"
_HEADER = struct.Struct("<4sBBHQQQ")
_STEP = struct.Struct("<BBHdd6IfI")
_REQUEST = struct.Struct("<BBHdIIiI5d16s320s")
_MAGIC, _FORMAT = b"GPAV", 1
_STEP_KIND, _REQUEST_KIND = 2, 3
_TOKENS_OF_STEP = 1
_PAUSE_S = 0.2
_RECORDS_PER_DATAGRAM = 64
# About a minute of an engine; beyond that the oldest are dropped while the agent is away.
_MOST_WAITING = 4_096


def step_record(step: Step, engine: str, unix_ns: Callable[[float], int]) -> EngineStep:
    """A step as the agent gets it; of equal ones in a row, the last."""
    return EngineStep(
        engine=engine,
        ended_at=unix_ns(step.ended_s) / 1e9,
        duration_s=step.ended_s - step.began_s,
        prefill_tokens=step.prefill_tokens,
        decode_tokens=len(step.tokens),
        running=step.load.running,
        waiting_capacity=step.load.waiting - step.load.deferred,
        waiting_deferred=step.load.deferred,
        kv_usage=step.load.kv_usage,
        preempted=step.preemptions,
        tokens_of_step=True,
    )


def ended_record(done: Finished, engine: str, unix_ns: Callable[[float], int]) -> EndedRequest:
    """A finished request as the agent gets it."""
    request = done.request
    return EndedRequest(
        engine=engine,
        request_id=request.request_id,
        ended_at=unix_ns(done.last_token_s) / 1e9,
        finish_reason=request.finish_reason,
        input_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        cached_tokens=request.cached_tokens,
        preemptions=done.preemptions,
        queue_s=done.queue_s,
        prefill_s=done.prefill_s,
        decode_s=done.decode_s,
        e2e_s=done.e2e_s,
        ttft_s=done.ttft_s,
    )


class PluginSender:
    """Sends steps and finished requests to the agent's socket. Without an agent they wait."""

    def __init__(self, engine: str, unix_ns: Callable[[float], int]) -> None:
        """Like vLLM's plugin, it finds the socket in the environment; else it is silent."""
        path = os.environ.get(PATH_VARIABLE, "")
        self._path = path if path.startswith("/") else ""
        self._engine = engine
        self._unix_ns = unix_ns
        self._run = int.from_bytes(os.urandom(8), "little")
        self._waiting: deque[bytes] = deque()
        self._first = self._dropped = 0

    def observe(self, step: Step) -> None:
        """Queue the records of a step."""
        if not self._path:
            return
        if step.ended_s > step.began_s:
            self._waiting.append(_packed_step(step_record(step, self._engine, self._unix_ns)))
        for done in step.finished:
            self._waiting.append(_packed_request(ended_record(done, self._engine, self._unix_ns)))
        while len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            self._first += 1
            self._dropped += 1

    async def run(self) -> None:
        """Send what waits, until cancelled; without a path, return. What waits then is lost."""
        if not self._path:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as to:
            while True:
                while self._waiting and self._sent(to, self._next()):
                    pass
                await asyncio.sleep(_PAUSE_S)

    def _next(self) -> int:
        return min(len(self._waiting), _RECORDS_PER_DATAGRAM)

    def _sent(self, to: socket.socket, count: int) -> bool:
        """Send the oldest records; False if the agent does not take them now."""
        records = b"".join(self._waiting[index] for index in range(count))
        header = _HEADER.pack(_MAGIC, _FORMAT, 0, count, self._run, self._first, self._dropped)
        try:
            to.sendto(header + records, self._path)
        except OSError:
            # The agent is away, or its queue is full.
            return False
        for _ in range(count):
            self._waiting.popleft()
        self._first += count
        return True


def _packed_step(step: EngineStep) -> bytes:
    waiting = (step.waiting_capacity, step.waiting_deferred, step.waiting_kv_transfer)
    computed = (step.prefill_tokens, step.decode_tokens)
    return _STEP.pack(
        *(_STEP_KIND, _TOKENS_OF_STEP, step.rank, step.ended_at, step.duration_s),
        *(*computed, step.running, *waiting, step.kv_usage, step.preempted),
    )


def _packed_request(done: EndedRequest) -> bytes:
    name = done.request_id.encode()
    return _REQUEST.pack(
        *(_REQUEST_KIND, 0, len(name), done.ended_at, done.input_tokens, done.output_tokens),
        *(done.cached_tokens, done.preemptions),
        *(done.queue_s, done.prefill_s, done.decode_s, done.e2e_s, done.ttft_s),
        *(done.finish_reason.encode(), name),
    )
