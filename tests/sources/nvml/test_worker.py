import threading

import pytest

from agent.sources.nvml.source import Worker

WITHIN_S = 20.0


def test_tasks_are_done_one_after_the_other_in_another_thread() -> None:
    worker = Worker("under test")
    threads = [worker.submit(threading.current_thread) for _ in range(2)]
    first, second = (thread.result(WITHIN_S) for thread in threads)
    worker.close()
    assert first is second is not threading.current_thread()
    # The interpreter waits at exit for every thread that is no daemon.
    assert first.daemon


def test_the_error_of_a_task_is_its_result_and_the_next_is_done() -> None:
    def fail() -> None:
        raise OSError("driver")

    worker = Worker("under test")
    failed = worker.submit(fail)
    with pytest.raises(OSError, match="driver"):
        failed.result(WITHIN_S)
    assert worker.submit(lambda: 1).result(WITHIN_S) == 1
    worker.close()


def test_close_ends_the_thread_after_what_was_submitted() -> None:
    worker = Worker("under test")
    thread = worker.submit(threading.current_thread)
    worker.close()
    thread.result(WITHIN_S).join(WITHIN_S)
    assert not thread.result().is_alive()
