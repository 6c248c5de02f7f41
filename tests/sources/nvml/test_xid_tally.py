from agent.catalog.xids import COUNTED_XIDS
from agent.sources.nvml.xid_tally import XidTally


def test_a_gpu_that_is_not_watched_has_no_counts() -> None:
    assert XidTally().facts("GPU-0") == {}


def test_what_is_watched_counts_xids_from_zero_without_a_time() -> None:
    tally = XidTally()
    tally.watch(["GPU-0"])
    assert tally.facts("GPU-0") == {("gpu_xid_errors", (str(xid),)): 0 for xid in COUNTED_XIDS}


def test_an_error_is_counted_with_its_time() -> None:
    tally = XidTally()
    tally.watch(["GPU-0", "GPU-1"])
    assert tally.seen("GPU-0", 79, 5.0) == 1
    assert tally.seen("GPU-0", 79, 7.0) == 2
    facts = tally.facts("GPU-0")
    assert facts["gpu_xid_errors", ("79",)] == 2
    assert facts["gpu_xid_last_seen_timestamp_seconds", ("79",)] == 7.0
    assert tally.facts("GPU-1")["gpu_xid_errors", ("79",)] == 0


def test_to_watch_again_forgets_nothing() -> None:
    tally = XidTally()
    tally.watch(["GPU-0"])
    tally.seen("GPU-0", 31, 5.0)
    tally.watch(["GPU-0"])
    assert tally.facts("GPU-0")["gpu_xid_errors", ("31",)] == 1
    assert tally.facts("GPU-0")["gpu_xid_last_seen_timestamp_seconds", ("31",)] == 5.0


def test_facts_that_were_read_do_not_change_under_the_reader() -> None:
    tally = XidTally()
    tally.watch(["GPU-0"])
    before = tally.facts("GPU-0")
    tally.seen("GPU-0", 79, 5.0)
    assert before["gpu_xid_errors", ("79",)] == 0
