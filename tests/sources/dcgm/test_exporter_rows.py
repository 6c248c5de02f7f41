import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import String

from agent.sources.dcgm.exporter_gpus import (
    UNKNOWN_INDEX,
    Entity,
    RowUnusable,
    entity_of,
    index_of,
    name_of,
    pod_labels,
)
from agent.store.tables import gpu_samples

GPU = "GPU-1f2e3d4c-aaaa-bbbb-cccc-0123456789ab"


@pytest.mark.parametrize("label", ["UUID", "uuid", "gpu_uuid"])
def test_the_uuid_has_the_label_names_of_all_releases(label: str) -> None:
    assert entity_of({"gpu": "0", label: GPU}) == Entity(GPU)


@pytest.mark.parametrize(
    "spelling",
    [
        GPU.upper(),
        GPU.lower(),
        GPU.removeprefix("GPU-"),
        GPU.replace("-", "").replace("GPU", "GPU-"),
        GPU.removeprefix("GPU-").replace("-", "").upper(),
        f" {GPU} ",
    ],
)
def test_a_uuid_is_spelled_as_nvml_spells_it(spelling: str) -> None:
    assert entity_of({"UUID": spelling}).gpu == GPU


@given(st.uuids())
def test_two_spellings_of_one_uuid_are_one_gpu(uuid: object) -> None:
    assert entity_of({"UUID": f"GPU-{uuid}"}) == entity_of({"uuid": str(uuid).upper()})


def test_a_uuid_of_another_form_is_kept_as_it_is() -> None:
    assert entity_of({"UUID": "GPU-simulated-0"}).gpu == "GPU-simulated-0"


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ({}, "uuid_missing"),
        ({"gpu": "0", "UUID": ""}, "uuid_missing"),
        ({"nvswitch": "nvswitch0"}, "uuid_missing"),
        ({"UUID": "x" * 97}, "uuid_malformed"),
        ({"nvlink": "3", "gpu_uuid": GPU}, "link_row"),
        ({"UUID": GPU, "GPU_I_PROFILE": "1g.10gb"}, "instance_malformed"),
        ({"UUID": GPU, "GPU_I_ID": "-1"}, "instance_malformed"),
        ({"UUID": GPU, "GPU_I_ID": "²"}, "instance_malformed"),
        ({"UUID": GPU, "GPU_I_ID": "9" * 5000}, "instance_malformed"),
    ],
)
def test_a_row_about_no_whole_gpu_is_refused_by_name(labels: dict[str, str], reason: str) -> None:
    with pytest.raises(RowUnusable) as caught:
        entity_of(labels)
    assert caught.value.reason == reason


def test_a_row_with_an_instance_is_about_that() -> None:
    assert entity_of({"UUID": GPU, "GPU_I_PROFILE": "1g.10gb", "GPU_I_ID": "9"}) == Entity(GPU, 9)


def test_an_empty_instance_is_none() -> None:
    assert entity_of({"UUID": GPU, "GPU_I_PROFILE": "", "GPU_I_ID": ""}) == Entity(GPU)


@pytest.mark.parametrize(
    ("labels", "index"),
    [
        ({"gpu": "3", "device": "nvidia7"}, 3),
        ({"device": "nvidia7"}, 7),
        ({"gpu": "", "device": "nvidia7"}, 7),
        ({"gpu": "three"}, UNKNOWN_INDEX),
        ({"gpu": "9" * 5000}, UNKNOWN_INDEX),
        ({}, UNKNOWN_INDEX),
    ],
)
def test_the_index_is_in_the_labels_or_unknown(labels: dict[str, str], index: int) -> None:
    assert index_of(labels) == index


def test_the_model_has_the_label_names_of_all_releases() -> None:
    assert name_of({"modelName": "NVIDIA H200"}) == name_of({"model_name": "NVIDIA H200"})
    assert name_of({}) == ""


def test_labels_of_pods_count_where_they_are_not_empty() -> None:
    assert pod_labels({"pod": "", "namespace": "", "container": ""}) == 0
    assert pod_labels({"pod": "a", "pod_uid": "u", "vgpu": "0"}) == 3


def test_a_name_is_cut_to_what_the_database_takes() -> None:
    name = gpu_samples.c.name.type
    assert isinstance(name, String)
    assert len(name_of({"modelName": "x" * 5000})) == name.length
