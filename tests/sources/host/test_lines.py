from hypothesis import given
from hypothesis import strategies as st

from agent.catalog.failure_lines import LineMeaning
from agent.sources.host.log import (
    MAX_EVIDENCE_CHARACTERS,
    MAX_FINDINGS,
    MAX_LINE_BYTES,
    LineScanner,
)

OOM = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def meanings(scanner: LineScanner) -> list[str]:
    return [finding.meaning.value for finding in scanner.drain().findings]


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_lines_do_not_depend_on_the_pieces_that_they_come_in(pieces: list[bytes]) -> None:
    log = b"x\n" + OOM + b"\n" + b"".join(pieces) + b"\nEngineCore failed to start.\n"
    whole, torn = LineScanner(), LineScanner()
    whole.feed(log)
    for position in range(0, len(log), 7):
        torn.feed(log[position : position + 7])
    sample = whole.drain()
    assert sample == torn.drain()
    assert sample.findings[0].meaning is LineMeaning.CUDA_OOM


def test_a_line_is_read_once_it_is_whole() -> None:
    scanner = LineScanner()
    scanner.feed(OOM)
    assert scanner.drain().lines == 0
    scanner.feed(b"\n\r\n\n")
    sample = scanner.drain()
    assert [finding.meaning.value for finding in sample.findings] == ["cuda_oom"]
    assert sample.lines == 2
    assert (scanner.drain().findings, scanner.drain().lines) == ((), 0)


def test_of_a_huge_line_the_beginning_is_read() -> None:
    scanner = LineScanner()
    for piece in (OOM, b"x" * 10_000_000, b"\n", OOM, b"\n"):
        scanner.feed(piece)
    sample = scanner.drain()
    assert [finding.meaning.value for finding in sample.findings] == ["cuda_oom", "cuda_oom"]
    assert sample.lines == 2
    assert all(len(finding.line) <= MAX_EVIDENCE_CHARACTERS for finding in sample.findings)


def test_what_stands_far_inside_a_huge_line_is_not_read() -> None:
    scanner = LineScanner()
    scanner.feed(b"x" * MAX_LINE_BYTES + OOM + b"\n")
    assert meanings(scanner) == []


def test_binary_garbage_hides_no_line_and_stays_out_of_the_evidence() -> None:
    scanner = LineScanner()
    scanner.feed(bytes(range(256)) * 50 + b"\n\x00\x00\xff" + OOM + b"\x00\xfe\n")
    (finding,) = scanner.drain().findings
    assert finding.line == OOM.decode()


def test_colours_are_no_part_of_a_line() -> None:
    scanner = LineScanner()
    scanner.feed(b"\x1b[1;36m(APIServer pid=1)\x1b[0;0m ERROR EngineCore failed\x1b[0m to start.\n")
    (finding,) = scanner.drain().findings
    assert finding.line == "(APIServer pid=1) ERROR EngineCore failed to start."


def test_a_storm_of_findings_is_bounded() -> None:
    scanner = LineScanner()
    scanner.feed((OOM + b"\n") * (MAX_FINDINGS + 5))
    assert len(scanner.drain().findings) == MAX_FINDINGS
