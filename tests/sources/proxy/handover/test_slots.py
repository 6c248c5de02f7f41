"""What a worker put into its slots outlives it."""

import os
import signal
import sys
from collections.abc import Callable

import pytest

from agent.sources.proxy.handover.slots import SLOT_BYTES, LeftSlots, RequestSlots


def killed(work: Callable[[], None]) -> None:
    """Do this in a process that ends as by kill -9."""
    pid = os.fork()
    if pid == 0:
        work()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("later_run", [False, True])
def test_the_next_worker_finds_what_a_killed_one_did_not_free(later_run: bool) -> None:
    slots = RequestSlots(4)

    def work() -> None:
        assert slots.begin() is None
        first, second, third = map(slots.hold, (b"first", b"second", b"third"))
        assert None not in (first, second, third)
        slots.replace(second or 0, b"second, ended")
        slots.free(third or 0)
        slots.count_without(1)

    killed(work)
    slots = RequestSlots.left(slots.descriptor) if later_run else slots
    assert slots.begin() == LeftSlots({0: b"first", 1: b"second, ended"}, 1)
    # They stay where they are, and the next records go elsewhere.
    assert (slots.hold(b"next"), slots.hold(b"last"), slots.hold(b"one more")) == (2, 3, None)


def test_slots_of_another_layout_are_refused() -> None:
    slots = RequestSlots(1)
    os.pwrite(slots.descriptor, (7).to_bytes(4, sys.byteorder), 0)
    with pytest.raises(ValueError, match="layout 7"):
        RequestSlots.left(slots.descriptor)


def test_memory_that_is_given_back_is_free_in_each_process() -> None:
    slots = RequestSlots(1)
    slots.release()
    assert os.fstat(slots.descriptor).st_size == 0


def test_a_record_that_is_too_large_has_no_slot() -> None:
    slots = RequestSlots(1)
    slots.begin()
    assert slots.hold(b"x" * (SLOT_BYTES + 1)) is None
    assert slots.hold(b"x" * SLOT_BYTES) == 0
    assert slots.replace(0, b"x" * (SLOT_BYTES + 1)) is None
    assert slots.hold(b"the slot is free") == 0


def test_a_half_written_slot_is_ignored() -> None:
    slots = RequestSlots(2)

    class Torn(bytes):
        def __len__(self) -> int:
            # The copy of a longer record than its slot expects fails in the middle of a write.
            return 1

    slots.begin()
    slots.hold(b"before")
    with pytest.raises(ValueError, match="different structures"):
        slots.replace(0, Torn(b"after"))
    assert slots.begin() == LeftSlots({}, 0)
