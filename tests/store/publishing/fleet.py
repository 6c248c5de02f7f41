"""Many agents, whose files are published to one PostgreSQL at the same time."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine

from agent.errors import StoreUnavailable
from agent.records.objective import JudgedRequest
from agent.store.transactions import request_write
from agent.store.writing import Write
from tests.real_parts.waiting import eventually
from tests.store.making import NOON, WITHIN_S, request
from tests.store.publishing.published import CUT_OFF_S, Publishing, file_in, publishing

# Of one agent: enough for a day at a hundred a second.
_NUMBERS = 10_000_000


@dataclass(frozen=True, slots=True)
class Fleet:
    """Running agents, each with its file and publisher; each gets `per_s` requests/s."""

    files: list[Engine]
    publishing: list[Publishing]
    per_s: int

    def work(self, first_s: int, last_s: int) -> None:
        """Each agent stores the requests of these seconds, a commit for each second."""

        def of_agent(agent: int) -> None:
            write = request_write(self.files[agent])
            for second in range(first_s, last_s):
                _write_until_stored(write, list(self._ended(agent, second)))

        with ThreadPoolExecutor(len(self.files)) as agents:
            list(agents.map(of_agent, range(len(self.files))))

    def _ended(self, agent: int, second: int) -> Iterator[JudgedRequest]:
        began_at = NOON + second
        for number in range(second * self.per_s, (second + 1) * self.per_s):
            yield request(
                agent * _NUMBERS + number,
                agent=f"agent-{agent}",
                engine=f"chat-{agent}",
                started_at=began_at,
                ended_at=began_at + 1.0,
            )

    def waiting(self) -> int:
        """How many rows wait in all files."""
        return sum(each.waiting() for each in self.publishing)

    def all_published(self, within_s: float = WITHIN_S) -> None:
        """Wait until no file has anything that waits."""
        eventually(lambda: self.waiting() == 0, within_s=within_s, what="nothing that waits")


def _write_until_stored(write: Write, judged: list[JudgedRequest]) -> None:
    """Send again what was refused, as exporters do: a busy disk may keep the lock too long."""
    while True:
        try:
            write(judged)
        except StoreUnavailable:
            continue
        return


@contextmanager
def running_fleet(
    folder: Path, url: str, *, agents: int, per_s: int, cut_off_s: float = CUT_OFF_S
) -> Iterator[Fleet]:
    """A fleet whose files are in this folder; at the end everything is published."""
    with ExitStack() as stack:
        files = [
            stack.enter_context(file_in(folder, f"agent-{number}.db")) for number in range(agents)
        ]
        running = [
            stack.enter_context(publishing(file, url, agent=f"agent-{number}", cut_off_s=cut_off_s))
            for number, file in enumerate(files)
        ]
        yield Fleet(files, running, per_s)
