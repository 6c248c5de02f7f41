from collections.abc import Iterator
from pathlib import Path

import pynvml  # type: ignore[import-untyped]
import pytest

from tests.sources.nvml.fake_driver import FakeDriver, ScriptedNvml, build


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
def nvml(driver: FakeDriver) -> Iterator[ScriptedNvml]:
    nvml = ScriptedNvml(driver)
    yield nvml
    nvml.close()


@pytest.fixture
def impatient(driver: FakeDriver) -> Iterator[ScriptedNvml]:
    """A source that waits no longer than an idle machine needs for a read."""
    nvml = ScriptedNvml(driver, timeout_s=0.01)
    yield nvml
    nvml.close()
