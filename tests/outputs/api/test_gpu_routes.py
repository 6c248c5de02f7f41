"""GPUs: the newest sample of each, and the samples of one."""

from typing import Any
from urllib.parse import quote

import pytest

from agent.records.gpu import GpuSample, MigInstance
from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import unix

MIG_INSTANCE = MigInstance(
    uuid="MIG-1",
    name="1g.18gb",
    gpu_instance=7,
    compute_instance=None,
    gpu_slices=1,
    facts={("gpu_memory_used_bytes", ()): 5e9},
    processes={4242: None},
)
MIG_INSTANCE_ITEM = {
    "uuid": "MIG-1",
    "name": "1g.18gb",
    "gpu_instance": 7,
    "compute_instance": None,
    "gpu_slices": 1,
    "facts": {"gpu_memory_used_bytes": 5e9},
    "processes": [{"pid": 4242, "memory_bytes": None}],
}


def sample(at: float, gpu: str = "GPU-1", **given: Any) -> GpuSample:
    values: dict[str, Any] = {"index": 0, "name": "NVIDIA H200", "facts": {("gpu_up", ()): 1.0}}
    return GpuSample(gpu=gpu, at=at, **(values | given))


def ages_s(api: Api, gpu: str = "GPU-1", **parameters: Any) -> list[float]:
    """Return the ages of the listed samples."""
    return [
        api.agent.now - unix(item["at"])
        for page in api.pages(f"gpus/{gpu}", **parameters)
        for item in page
    ]


def test_a_response_has_everything_of_a_sample(api: Api) -> None:
    facts = {
        ("gpu_power_watts", ()): 312.5,
        ("gpu_clock_hertz", ("sm",)): float("nan"),
        ("gpu_ecc_errors", ("corrected", "lifetime")): 0.0,
    }
    read = sample(
        api.agent.now - 2.5,
        index=3,
        facts=facts,
        processes={17: 5_000_000_000, 18: None},
        mig_instances=(MIG_INSTANCE,),
    )
    api.store_gpus(read)
    response = api.query("gpus")
    assert response["next"] is None
    (item,) = response["items"]
    assert api.query("gpus/GPU-1")["items"] == [item]
    assert unix(item.pop("at")) == read.at
    assert item == {
        "gpu": "GPU-1",
        "index": 3,
        "name": "NVIDIA H200",
        "agent": "agent-0",
        "problem": None,
        "facts": {
            "gpu_power_watts": 312.5,
            "gpu_clock_hertz{sm}": None,
            "gpu_ecc_errors{corrected,lifetime}": 0.0,
        },
        "processes": [
            {"pid": 17, "memory_bytes": 5_000_000_000},
            {"pid": 18, "memory_bytes": None},
        ],
        "mig_instances": [MIG_INSTANCE_ITEM],
    }


def test_a_gpu_that_could_not_be_read_has_its_problem_and_nothing_else(api: Api) -> None:
    api.store_gpus(sample(api.agent.now, problem="gpu_lost", facts={("gpu_up", ()): 0.0}))
    (item,) = api.query("gpus")["items"]
    assert (item["problem"], item["facts"]) == ("gpu_lost", {"gpu_up": 0.0})
    assert (item["processes"], item["mig_instances"]) == (None, [])


def test_the_newest_sample_of_every_agents_gpus_is_listed(api: Api) -> None:
    now = api.agent.now
    old = [sample(now - 60, "GPU-1"), sample(now - 60, "GPU-2", index=1)]
    api.store_gpus(*old, sample(now - 10, "GPU-1"), others=[sample(now - 9 * 86400, "GPU-3")])
    found = api.query("gpus")["items"]
    assert api.query("gpus", agent="agent-0")["items"] == found[:2]
    listed = [(item["agent"], item["gpu"], now - unix(item["at"])) for item in found]
    assert listed == [
        ("agent-0", "GPU-1", 10.0),
        ("agent-0", "GPU-2", 60.0),
        ("agent-1", "GPU-3", 9 * 86400.0),
    ]


def test_the_samples_of_a_gpu_in_the_window_are_listed_newest_first_in_pages(api: Api) -> None:
    ages = [0.0, 10.0, 60.0, 60.5, 3600.0, 3600.5, 86400.0]
    others = [sample(api.agent.now - 5, "GPU-2")]
    api.store_gpus(*[sample(api.agent.now - age_s) for age_s in ages], others=others)
    for limit in (1, 2, 5, 1000):
        assert ages_s(api, limit=limit) == ages[:5]
    assert ages_s(api, window="1m") == ages[:3]
    assert ages_s(api, window="7d") == ages


def test_a_page_holds_a_hundred_items_by_default(api: Api) -> None:
    api.store_gpus(*[sample(api.agent.now - age_s) for age_s in range(101)])
    assert len(api.query("gpus/GPU-1")["items"]) == 100


def test_samples_of_two_agents_that_read_one_gpu_are_separate(api: Api) -> None:
    now = api.agent.now
    api.store_gpus(sample(now - 1), others=[sample(now - 2)])
    agents = [item["agent"] for item in api.query("gpus/GPU-1")["items"]]
    assert agents == ["agent-0", "agent-1"]


def test_a_known_gpu_without_a_sample_in_the_window_has_an_empty_list(api: Api) -> None:
    api.store_gpus(sample(api.agent.now - 3601))
    assert api.query("gpus/GPU-1") == {"items": [], "next": None}


@pytest.mark.parametrize("gpu", ["GPU-9", "GPU-", "0", "a/b", "%25", "größe", "x" * 5000])
def test_an_unknown_gpu_is_not_found(api: Api, gpu: str) -> None:
    api.store_gpus(sample(api.agent.now))
    status, sentence = api.refusal(f"gpus/{quote(gpu, safe='/%')}")
    assert status == 404
    assert sentence.endswith("is stored; see /api/v1/gpus")


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"window": "401d"}, "window: 401d is not between 10s and 400d"),
        ({"window": "9s"}, "window: 9s is not between 10s and 400d"),
        ({"window": "soon"}, "window: "),
        ({"limit": "1001"}, "limit: Input should be less than or equal to 1000 (got '1001')"),
        ({"limit": "0"}, "limit: Input should be greater than or equal to 1 (got '0')"),
    ],
)
def test_an_invalid_query_is_refused_with_a_sentence(
    busy: Api, parameters: dict[str, str], reason: str
) -> None:
    status, sentence = busy.refusal("gpus/GPU-1", **parameters)
    assert status == 422
    assert sentence.startswith(reason)


def test_a_gpu_with_a_nul_character_is_refused(busy: Api) -> None:
    status, sentence = busy.refusal("gpus/a%00b")
    assert (status, sentence) == (422, "gpu: no name holds a NUL character (got 'a\\x00b')")
