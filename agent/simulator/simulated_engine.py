"""The simulated engine in real time: it runs the batch by a clock and delivers tokens."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from agent.errors import AgentError
from agent.simulator.batching import Batch, EngineRequest, Step, Token
from agent.simulator.scenario import Faults

Observer = Callable[[Step], None]

# Time between two checks whether a hang has begun or ended, or the engine is dead.
_CHECK_S = 0.05


class EngineDiedError(AgentError):
    """The engine died before the request ended."""


class Clock:
    """A monotonic clock that starts at 0, and converts its times to Unix time."""

    def __init__(self, lead_s: float = 0.0) -> None:
        """`lead_s` is how long ago its 0 was."""
        self._origin_s = time.monotonic() - lead_s
        self._origin_unix_ns = time.time_ns() - round(lead_s * 1e9)

    def now_s(self) -> float:
        """Seconds since the clock was made."""
        return time.monotonic() - self._origin_s

    def unix_ns(self, at_s: float) -> int:
        """Nanoseconds since 1970 of a time of this clock."""
        return self._origin_unix_ns + round(at_s * 1e9)

    async def sleep_until(self, at_s: float) -> None:
        """Return at `at_s`; other tasks run even if that time has passed."""
        await asyncio.sleep(max(0.0, at_s - self.now_s()))


class Engine:
    """One engine. The observers get each step, and the caller of `generate` gets its tokens.

    The batch computes the start and the end of each step. A late wake-up of this process delays the
    delivery of a token and changes no measured latency.
    """

    def __init__(
        self,
        batch: Batch,
        clock: Clock,
        observers: Sequence[Observer],
        faults: Faults | None = None,
    ) -> None:
        self._batch = batch
        self._clock = clock
        self._observers = observers
        self._faults = faults or Faults()
        # None instead of a token: the engine died.
        self._answers: dict[EngineRequest, asyncio.Queue[Token | None]] = {}
        self._submitted = asyncio.Event()

    def now_s(self) -> float:
        """The engine's clock, which arrivals of requests use."""
        return self._clock.now_s()

    async def run(self) -> None:
        """Step until cancelled."""
        while True:
            start_s = self._batch.next_start_s()
            if self._hangs():
                await asyncio.sleep(_CHECK_S)
            elif await self._idle_until(start_s):
                work = self._batch.begin(start_s)
                await self._clock.sleep_until(work.ends_s)
                self._publish(self._batch.end(work))

    @property
    def is_dead(self) -> bool:
        """Whether the engine is dead now."""
        return self._faults.at(self._clock.now_s()).dead

    async def die_and_return(self, restart: Callable[[], None]) -> None:
        """Lose all requests when a fault kills the engine, and restart when it ends."""
        dead = False
        while True:
            was_dead, dead = dead, self.is_dead
            if dead and not was_dead:
                self._batch.drop_all()
                for answer in self._answers.values():
                    answer.put_nowait(None)
            if was_dead and not dead:
                restart()
            await asyncio.sleep(_CHECK_S)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Token, None]:
        """The tokens of one request; closing the generator early aborts the request.

        Raises EngineDiedError.
        """
        answer: asyncio.Queue[Token | None] = asyncio.Queue()
        self._answers[request] = answer
        self._batch.submit(request)
        self._submitted.set()
        try:
            while (token := await answer.get()) is not None:
                yield token
                if token.finish_reason is not None:
                    return
            raise EngineDiedError("the simulated engine died")
        finally:
            del self._answers[request]
            if self._batch.abort(request):
                self._publish(Step(load=self._batch.load))

    def fail(self) -> None:
        """Count a request that got an error."""
        self._publish(Step(load=self._batch.load, failed=1))

    def _hangs(self) -> bool:
        """A hang without requests has no effect, so the engine goes on."""
        hang = self._faults.at(self._clock.now_s()).hang
        return hang and self._batch.load.running > 0

    async def _idle_until(self, at_s: float) -> bool:
        """Wait for `at_s`; False if a new request arrives, which may change the next step."""
        self._submitted.clear()
        delay_s = at_s - self._clock.now_s()
        if delay_s <= 0:
            return True
        try:
            async with asyncio.timeout(None if math.isinf(delay_s) else delay_s):
                await self._submitted.wait()
        except TimeoutError:
            return True
        return False

    def _publish(self, step: Step) -> None:
        for observer in self._observers:
            observer(step)
        for token in step.tokens:
            if answer := self._answers.get(token.request):
                answer.put_nowait(token)
