"""Takes the proxy's records one by one without waiting, and stores them in batches."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from agent.catalog.reasons import ProxyFailure
from agent.errors import StoreUnavailable
from agent.records.request import RequestRecord

_LOG = logging.getLogger(__name__)

# A minute of a thousand requests a second, at about 2 kB each.
MAX_WAITING_RECORDS = 65_536
_MAX_AT_ONCE = 512
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 10.0


class RecordIntake:
    """Takes records in the event loop without ever waiting, and passes them on in its own task.

    It tries again while the store is away. When too many records wait, it drops the newest.
    `accept` returns how many can never be stored. `on_dropped` gets the reason for each lost one.
    """

    def __init__(
        self,
        accept: Callable[[Sequence[RequestRecord]], Awaitable[int]],
        on_dropped: Callable[[str], None],
    ) -> None:
        self._accept = accept
        self._on_dropped = on_dropped
        self._waiting: deque[RequestRecord] = deque()
        self._came = asyncio.Event()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """How many records wait."""
        return len(self._waiting)

    def take(self, record: RequestRecord) -> None:
        """Keep a record for storing."""
        if len(self._waiting) >= MAX_WAITING_RECORDS:
            self._on_dropped(ProxyFailure.STORE_BEHIND)
            return
        self._waiting.append(record)
        self._came.set()

    def start(self) -> None:
        """Begin to pass records on."""
        self._task = asyncio.create_task(self._run(), name="record-intake")

    async def close(self, within_s: float) -> None:
        """Pass on all waiting records, as far as the store takes them now and in time."""
        self._closing.set()
        self._came.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=max(within_s, 0.0))
        if self._waiting:
            _LOG.warning("%d proxied requests are lost: the store is away", self.waiting)
        for _ in range(len(self._waiting)):
            self._on_dropped(ProxyFailure.STORE_AWAY_AT_STOP)
        self._waiting.clear()

    async def _run(self) -> None:
        delay_s = _FIRST_DELAY_S
        while True:
            await self._came.wait()
            self._came.clear()
            while self._waiting:
                if await self._pass_on():
                    delay_s = _FIRST_DELAY_S
                elif self._closing.is_set():
                    return
                else:
                    await self._pause(delay_s)
                    delay_s = min(2 * delay_s, _MAX_DELAY_S)
            if self._closing.is_set():
                return

    async def _pass_on(self) -> bool:
        """Pass on the oldest records; False where the store is away."""
        batch = [self._waiting[place] for place in range(min(_MAX_AT_ONCE, len(self._waiting)))]
        try:
            refused = await self._accept(batch)
        except StoreUnavailable as error:
            _LOG.warning("%d proxied requests wait for the database: %s", self.waiting, error)
            return False
        except Exception:
            # These records can never be stored, and must not delay the next ones.
            _LOG.exception("%d proxied requests could not be stored", len(batch))
            refused = len(batch)
        for _ in range(refused):
            self._on_dropped(ProxyFailure.RECORD_REFUSED)
        for _ in batch:
            self._waiting.popleft()
        return True

    async def _pause(self, delay_s: float) -> None:
        try:
            async with asyncio.timeout(delay_s):
                await self._closing.wait()
        except TimeoutError:
            pass
