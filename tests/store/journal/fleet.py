"""Many agents, each with a journal, that write to one PostgreSQL at the same time."""

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
from tests.store.journal.forwarded import CUT_OFF_S, Forwarding, forwarding, journal_in
from tests.store.making import NOON, WITHIN_S, request

# Of one agent: enough for a day at a hundred a second.
_NUMBERS = 10_000_000


@dataclass(frozen=True, slots=True)
class Fleet:
    """Running agents, each with its journal and what forwards it; each gets `per_s` requests/s."""

    journals: list[Engine]
    forwarding: list[Forwarding]
    per_s: int

    def work(self, first_s: int, last_s: int) -> None:
        """Each agent stores the requests of these seconds, a commit for each second."""

        def of_agent(agent: int) -> None:
            write = request_write(self.journals[agent])
            for second in range(first_s, last_s):
                _write_until_stored(write, list(self._ended(agent, second)))

        with ThreadPoolExecutor(len(self.journals)) as agents:
            list(agents.map(of_agent, range(len(self.journals))))

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
        """How many changes wait in all journals."""
        return sum(each.waiting() for each in self.forwarding)

    def all_forwarded(self, within_s: float = WITHIN_S) -> None:
        """Wait until no journal has anything that waits."""
        eventually(lambda: self.waiting() == 0, within_s=within_s, what="empty journals")


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
    """A fleet whose journals are in this folder; at the end all was forwarded."""
    with ExitStack() as stack:
        journals = [
            stack.enter_context(journal_in(folder, f"journal-{number}.db"))
            for number in range(agents)
        ]
        forwarded = [
            stack.enter_context(
                forwarding(journal, url, agent=f"agent-{number}", cut_off_s=cut_off_s)
            )
            for number, journal in enumerate(journals)
        ]
        yield Fleet(journals, forwarded, per_s)
