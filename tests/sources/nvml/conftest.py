from collections.abc import Iterator
from pathlib import Path

import pynvml  # type: ignore[import-untyped]
import pytest

from tests.sources.nvml.fake_driver import FakeDriver, build
from tests.sources.nvml.watched import Watched


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def old_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("old-nvml"), "-DOLD_DRIVER")


@pytest.fixture
def driver(library: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    driver = FakeDriver(library)
    driver.install()
    driver.do("gpus 1")
    return driver


@pytest.fixture
def watched(driver: FakeDriver) -> Iterator[Watched]:
    watched = Watched(driver)
    yield watched
    watched.close()


@pytest.fixture
def impatient(driver: FakeDriver) -> Iterator[Watched]:
    """A watch that waits for no answer longer than an idle machine needs to give it."""
    watched = Watched(driver, timeout_s=0.01)
    yield watched
    watched.close()
