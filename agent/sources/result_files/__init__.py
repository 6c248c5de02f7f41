"""Result files of load generators: see `_KNOWN`."""

import gzip
import zlib
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec

from agent.settings.named_files import in_time, read_named_file
from agent.sources.result_files import aiperf, guidellm, summaries, vllm_serve
from agent.sources.result_files.benched import (
    BenchedFigures,
    BenchedRun,
    ResultFileInvalid,
    check_numbers,
)

__all__ = [
    "BenchedFigures",
    "BenchedRun",
    "ResultFileInvalid",
    "read_result_file",
]

Found = BenchedRun | BenchedFigures

_GZIP = b"\x1f\x8b"

# After decompression. 10,000 requests of 1,000 tokens have ten million values, in 250 MB.
MAX_BYTES = 512 * 1024 * 1024
_MAX_VALUES = 20_000_000
_READ_WITHIN_S = 60.0

# What a file that is damaged, of other types or without a key raises.
_UNREADABLE = (
    *(OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError),
    *(ArithmeticError, RecursionError),
)
_KNOWN = f"{vllm_serve.KNOWN}, {aiperf.TOOL}, {guidellm.TOOL}, {summaries.KNOWN}"


def read_result_file(path: Path, number: int | None = None) -> Found:
    """The requests or figures of a file, also of a compressed one, or of AIPerf's folder.

    `number` counts the benchmarks of a file from 0; None takes the only one. Raises
    ResultFileInvalid.
    """
    file = path
    try:
        if in_time(path, path.is_dir):
            file = path / aiperf.RECORDS_FILE
            if not file.exists():
                raise ResultFileInvalid(
                    f"the folder {path} has no {file.name}, which AIPerf writes"
                )
        runs = _runs(file)
        for run in runs:
            check_numbers(run)
    except _UNREADABLE as error:
        raise ResultFileInvalid(f"{file} cannot be read: {error}") from error
    if not runs:
        raise ResultFileInvalid(
            f"{file} is not a result file with requests; known are those of {_KNOWN}"
        )
    last = len(runs) - 1
    if number is None and last:
        raise ResultFileInvalid(f"{file} has {last + 1} benchmarks; name one: {file}#0 to #{last}")
    if (number or 0) > last:
        raise ResultFileInvalid(f"{file} has no benchmark {number}; its last one is {last}")
    return runs[number or 0]


def _runs(file: Path) -> Sequence[Found]:
    """All benchmarks of a file; empty for a file of another tool."""
    content = _content(file)
    lines = [line for line in content.splitlines() if line.strip()]
    if not lines:
        raise ValueError("it is empty")
    try:
        whole = msgspec.json.decode(content)
    except msgspec.DecodeError:
        # JSON lines; a file that is neither fails again.
        whole = msgspec.json.decode(lines[0])
    if not isinstance(whole, dict):
        return ()
    if aiperf.is_aiperf_record(whole):
        found = aiperf.read_aiperf_records(lines, _figures_beside(file))
        return () if found is None else (found,)
    if vllm_serve.is_vllm(whole):
        return _appended(content, lines)
    return _of_object(whole)


def _appended(content: bytes, lines: Sequence[bytes]) -> Sequence[Found]:
    """The runs of a file to which each run was appended: a line each, or one alone in any form."""
    try:
        runs = [msgspec.json.decode(content)]
    except msgspec.DecodeError:
        runs = [msgspec.json.decode(line) for line in lines]
    return [vllm_serve.read_vllm(run) for run in runs]


def _of_object(content: Mapping[str, Any]) -> Sequence[Found]:
    if aiperf.is_aiperf(content):
        return (aiperf.read_aiperf(content),)
    if guidellm.is_guidellm(content):
        return guidellm.read_guidellm(content)
    summary = summaries.read_summary(content)
    return () if summary is None else (summary,)


def _content(file: Path) -> bytes:
    """The bytes of a file, decompressed. Raises ValueError beyond a limit."""
    content = read_named_file(file, max_bytes=MAX_BYTES, within_s=_READ_WITHIN_S)
    if content.startswith(_GZIP):
        with gzip.GzipFile(fileobj=BytesIO(content)) as compressed:
            content = compressed.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes after decompression")
    # A value of two bytes may take 70 in memory.
    if sum(map(content.count, (b",", b"[", b"{", b"\n"))) > _MAX_VALUES:
        raise ValueError(f"it has more than {_MAX_VALUES:,} values")
    return content


def _figures_beside(file: Path) -> Mapping[str, Any] | None:
    """The content of AIPerf's file of figures, which has the configured load."""
    for name in (aiperf.FIGURES_FILE, f"{aiperf.FIGURES_FILE}.gz"):
        beside = file.with_name(name)
        if beside.exists():
            found: dict[str, Any] = msgspec.json.decode(_content(beside))
            return found
    return None
