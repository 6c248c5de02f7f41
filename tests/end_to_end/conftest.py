"""One story for all tests of this folder."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.story import Story, played

# A disk that others fill lets a database wait, of which an alert at this speed rightly tells.
_IN_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="package")
def story() -> Iterator[Story]:
    """The story of the site, which runs until the last of these tests."""
    place = _IN_MEMORY if _IN_MEMORY.is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="site-", dir=place) as name,
        played(Path(name)) as story,
    ):
        yield story
