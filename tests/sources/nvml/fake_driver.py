"""A driver at the wire: a C library with NVML's binary interface, built here and scripted."""

import ctypes
import subprocess
from pathlib import Path

import pynvml  # type: ignore[import-untyped]

SOURCES = Path(__file__).with_name("standin")
FILE_NAME = "libnvidia-ml.so.1"
MIB = 1024 * 1024


def build(folder: Path, *flags: str) -> Path:
    """The library, compiled into `folder` under the name that the binding loads."""
    library = folder / FILE_NAME
    warnings = ("-Wall", "-Wextra", "-Werror")
    shape = ("-shared", "-fPIC", "-pthread", "-Wl,-Bsymbolic", "-std=gnu11", "-O1")
    sources = sorted(SOURCES.glob("*.c"))
    subprocess.run(["gcc", *shape, *warnings, *flags, "-o", library, *sources], check=True)
    return library


def gpu_uuid(index: int) -> str:
    """The UUID of the GPU with this index."""
    return f"GPU-00000000-0000-4000-8000-{index:012d}"


def mig_uuid(index: int, instance: int) -> str:
    """The UUID of an instance of a GPU."""
    return f"MIG-00000000-0000-4000-8000-{index:06d}{instance:06d}"


class FakeDriver:
    """The library in this process. What can be scripted is listed in script.c."""

    def __init__(self, library: Path) -> None:
        # Not by its name: a library that is found by name would serve every later test too.
        self.library = ctypes.CDLL(str(library))

    def do(self, *lines: str) -> None:
        """Obey script lines."""
        for line in lines:
            assert self.library.standin_do(line.encode()) == 0, f"not understood: {line}"

    def calls(self, function: str) -> int:
        """How often a function was called since the last `gpus` line."""
        return int(self.library.standin_calls(function.encode()))

    def install(self) -> None:
        """Let the binding call this library, as if it had loaded it."""
        pynvml.nvmlLib = self.library
        pynvml._nvmlGetFunctionPointer_cache.clear()
