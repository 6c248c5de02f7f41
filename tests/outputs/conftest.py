"""One browser for the tests of pages."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.real_parts.chromium import browsing


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A running browser; tests of other modules may run event loops of their own."""
    with browsing() as running:
        yield running
