"""Open requests are counted over all workers, also over one that was killed."""

import os
from collections.abc import Callable

from agent.sources.proxy.open_requests import OpenRequests


def in_a_worker(work: Callable[[], object]) -> None:
    """Do the work in a forked process, which then ends without a word, as a killed one does."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def test_each_worker_sees_the_open_requests_of_all_and_begins_with_none_of_its_own() -> None:
    counts = OpenRequests(["chat-0", "chat-1"], workers=2)
    counts.begin(0)
    counts.add("chat-0", 1)

    def other() -> None:
        counts.begin(1)
        counts.add("chat-0", 2)
        counts.add("chat-1", 3)
        counts.add("chat-1", -1)

    in_a_worker(other)
    assert dict(counts) == {"chat-0": 3, "chat-1": 2}
    # So they are for a process of a later supervisor.
    assert OpenRequests(["chat-0", "chat-1"], descriptor=counts.descriptor)["chat-1"] == 2
    # The worker after it learns how many requests it left open.
    assert counts.begin(1) == 4
    assert dict(counts) == {"chat-0": 1, "chat-1": 0}
