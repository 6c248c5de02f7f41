"""One story for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.end_to_end.story import Story, played


@pytest.fixture(scope="package")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """The story of the site, which runs until the last of these tests."""
    with played(tmp_path_factory.mktemp("site")) as story:
        yield story
