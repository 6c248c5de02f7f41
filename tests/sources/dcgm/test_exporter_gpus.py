"""GPUs in the expositions of NVIDIA's exporter, and counts of its Xid errors."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import String

from agent.catalog import gpu_facts as f
from agent.catalog.dcgm_fields import DCGM_FIELDS
from agent.catalog.gpu_problems import COUNTED_XIDS
from agent.sources.dcgm.exporter_gpus import (
    MOST_GPUS,
    UNKNOWN_INDEX,
    Entity,
    Levels,
    RowUnusable,
    XidCounts,
    XidLevels,
    XidSeries,
    entity_of,
    index_of,
    levels,
    name_of,
)
from agent.store.tables import gpu_samples
from tests.sources.dcgm.exporter_pages import MIB, body, gpu_of, gpus_of, page_of, row, uuid_of

# What strangers sent.
FOREIGN = Path(__file__).parents[2] / "data" / "foreign"


def test_the_default_exposition_has_both_gpus() -> None:
    found = gpus_of(body("dcgm-4.5-default"))
    busy, idle = found.gpus
    assert (busy.gpu, busy.index, busy.name) == (uuid_of(0), 0, "NVIDIA H200")
    assert (idle.gpu, idle.index, idle.name) == (uuid_of(1), 1, "NVIDIA H200")
    assert busy.facts == {
        ("gpu_memory_free_bytes", ()): 12000 * MIB,
        ("gpu_memory_used_bytes", ()): 131157 * MIB,
        ("gpu_memory_reserved_bytes", ()): 614 * MIB,
        # What nvidia-smi shows as the total of an H200.
        ("gpu_memory_total_bytes", ()): 143771 * MIB,
        ("gpu_utilization_ratio", ()): 0.75,
        ("gpu_memory_busy_ratio", ()): 0.5,
        ("gpu_graphics_active_ratio", ()): 0.8125,
        ("gpu_tensor_active_ratio", ()): 0.25,
        ("gpu_dram_active_ratio", ()): 0.625,
        ("gpu_power_watts", ()): 612.25,
        ("gpu_energy_joules", ()): 2147484.0,
        ("gpu_clock_hertz", ("sm",)): 1.98e9,
        ("gpu_clock_hertz", ("memory",)): 3.201e9,
        ("gpu_temperature_celsius", ("gpu",)): 58,
        ("gpu_temperature_celsius", ("memory",)): 61,
        ("gpu_remapped_rows", ("corrected",)): 2,
        ("gpu_remapped_rows", ("uncorrected",)): 1,
        ("gpu_row_remap_failed", ()): 0,
        ("gpu_pcie_replays", ()): 3,
    }
    assert idle.facts["gpu_utilization_ratio", ()] == 0
    assert (busy.xids, idle.xids) == ({XidSeries.LAST: {}}, {XidSeries.LAST: {31: 1}})
    assert busy.instances == ()
    assert found.dropped == {}


def test_the_newest_names_give_every_fact_of_the_table() -> None:
    gpu = gpu_of(body("dcgm-4.6-names"))
    assert gpu.facts.keys() == {field.key for field in DCGM_FIELDS}
    assert gpu.name == "NVIDIA H200"
    assert gpu.facts["gpu_utilization_ratio", ()] == 0.75
    assert gpu.facts["gpu_clock_max_hertz", ("memory",)] == 3.201e9
    assert gpu.facts["gpu_energy_joules", ()] == 2147484
    assert gpu.facts["gpu_power_instant_watts", ()] == 640.5
    assert gpu.facts["gpu_throttled_seconds", ("sw_power_cap",)] == pytest.approx(1.5)
    assert gpu.facts["gpu_ecc_errors", ("uncorrected", "lifetime")] == 4
    assert gpu.facts["gpu_nvlink_errors", ("replay",)] == 13
    assert gpu.facts["gpu_recovery_action", ()] == 2
    active = {labels for (fact, labels), on in gpu.facts.items() if "active" in fact and on == 1}
    assert active == {("idle",), ("sw_power_cap",)}
    assert gpu.facts["gpu_throttle_active", ("hw_thermal",)] == 0


def test_every_spelling_gives_its_fact_alone() -> None:
    for field in DCGM_FIELDS:
        if not field.beside:
            gpu = gpu_of(page_of(row(field.series, 1)))
            assert gpu.facts[field.key] == field.read(1), field.series


@pytest.mark.parametrize(("newer", "watts"), [(2, 2), (140737488355328.0, 1)])
def test_of_two_spellings_the_newer_counts_unless_it_is_blank(newer: float, watts: float) -> None:
    older = row("DCGM_FI_DEV_POWER_USAGE", 1)
    gpu = gpu_of(page_of(older, row("DCGM_FI_DEV_BOARD_POWER_WATTS", newer)))
    assert gpu.facts["gpu_power_watts", ()] == watts


def test_blanks_are_missing_facts() -> None:
    found = gpus_of(body("dcgm-2.3-blanks"))
    (gpu,) = found.gpus
    assert gpu.facts == {
        ("gpu_clock_hertz", ("sm",)): 139e6,
        ("gpu_clock_hertz", ("memory",)): 405e6,
    }
    assert gpu.xids == {XidSeries.LAST: {}}
    assert found.dropped == {}


@settings(max_examples=10)
@given(
    st.lists(
        st.sampled_from([2**31 - 16, 2**47, 2**63 - 16]).flatmap(
            lambda first: st.integers(first, first + 3)
        ),
        min_size=len(DCGM_FIELDS),
        max_size=len(DCGM_FIELDS),
    )
)
def test_no_blank_becomes_a_fact_whatever_the_series(blanks: list[int]) -> None:
    rows = [row(each.series, blank) for each, blank in zip(DCGM_FIELDS, blanks, strict=True)]
    gpu = gpu_of(page_of(*dict.fromkeys(rows)))
    assert gpu.facts == {}
    assert gpu.silent


@pytest.mark.parametrize(
    ("parts", "total"),
    [
        ({"USED": 100, "FREE": 200}, 300),
        ({"USED": 100, "FREE": 200, "RESERVED": 9223372036854775794}, 300),
        ({"USED": 100, "FREE": 200, "RESERVED": 7}, 307),
        ({"USED": 100, "FREE": 200, "RESERVED": 7, "TOTAL": 310}, 310),
        # Of one part no total is made.
        ({"USED": 100}, None),
        ({"FREE": 200}, None),
    ],
)
def test_used_memory_needs_no_reserved_and_the_total_is_summed(
    parts: dict[str, int], total: int | None
) -> None:
    gpu = gpu_of(page_of(*(row(f"DCGM_FI_DEV_FB_{part}", mib) for part, mib in parts.items())))
    used, known = (gpu.facts.get((f"gpu_memory_{part}_bytes", ())) for part in ("used", "total"))
    assert used == (100 * MIB if "USED" in parts else None)
    assert known == (None if total is None else total * MIB)


@pytest.mark.parametrize("page", ["dcgm-2.4-t4", "dcgm-3.1-pods"])
def test_memory_is_known_on_the_page_of_an_exporter_before_4_4(page: str) -> None:
    for gpu in gpus_of(body(page)).gpus:
        known = [gpu.facts[f"gpu_memory_{part}_bytes", ()] for part in ("used", "free", "total")]
        assert known[0] + known[1] == known[2]


def test_the_same_gpu_reads_the_same_by_the_names_of_both_releases() -> None:
    """The 23 default fields that exporter 4.9 renamed, 11 of them with another unit."""
    old, new = gpu_of(body("dcgm-4.8-one-gpu")), gpu_of(body("dcgm-4.9-one-gpu"))
    assert new.facts == pytest.approx(old.facts)
    assert (new.gpu, new.index, new.name, new.xids) == (old.gpu, old.index, old.name, old.xids)
    assert new.facts["gpu_clock_hertz", ("sm",)] == 1.98e9
    assert new.facts["gpu_memory_used_bytes", ()] == 131157 * MIB
    assert new.facts["gpu_energy_joules", ()] == 2147484
    assert new.facts["gpu_utilization_ratio", ()] == 0.75


def test_a_ratio_that_was_a_percentage_before_4_7_is_read_beside_names_of_4_7_only() -> None:
    ratio = row("DCGM_FI_DEV_GPU_UTIL_RATIO", 1)
    utilization = ("gpu_utilization_ratio", ())
    assert utilization not in gpu_of(page_of(ratio, row("DCGM_FI_DEV_FB_USED", 1))).facts
    since = gpu_of(page_of(ratio, row("DCGM_FI_DEV_FB_USED_BYTES", 1)))
    assert since.facts[utilization] == 1


def test_the_power_limit_of_the_board_stands_in_for_the_one_in_force() -> None:
    board = row("DCGM_FI_DEV_POWER_MGMT_LIMIT", 700)
    limit = ("gpu_power_limit_watts", ())
    assert gpu_of(page_of(board)).facts[limit] == 700
    enforced = row("DCGM_FI_DEV_ENFORCED_POWER_LIMIT", 650)
    assert gpu_of(page_of(board, enforced)).facts[limit] == 650


def test_mig_instances_have_what_is_theirs_and_the_gpu_has_the_rest() -> None:
    gpu = gpu_of(body("mig"))
    assert gpu.facts == {
        ("gpu_temperature_celsius", ("gpu",)): 58,
        ("gpu_power_watts", ()): 300,
        ("gpu_energy_joules", ()): 5,
    }
    large, small = gpu.instances
    assert (large.gpu_instance, large.compute_instance, large.gpu_slices) == (1, None, 3)
    assert (large.uuid, large.name) == (f"{uuid_of(0)}/1", "NVIDIA H100 80GB HBM3 MIG 3g.40gb")
    assert (small.gpu_instance, small.gpu_slices) == (9, 1)
    assert small.facts == {
        ("gpu_memory_free_bytes", ()): 9000 * MIB,
        ("gpu_memory_used_bytes", ()): 500 * MIB,
        ("gpu_memory_reserved_bytes", ()): 50 * MIB,
        ("gpu_memory_total_bytes", ()): 9550 * MIB,
        ("gpu_graphics_active_ratio", ()): 0.25,
        ("gpu_tensor_active_ratio", ()): 0,
    }
    assert gpu.xids == {XidSeries.LAST: {}, XidSeries.WINDOW: {}}


def test_a_gpu_with_rows_of_its_own_uses_these() -> None:
    power, dram = "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_PROF_DRAM_ACTIVE"
    gpu = gpu_of(
        page_of(
            row(power, 0.25, GPU_I_ID="1", GPU_I_PROFILE="1c.3g.40gb"),
            row(dram, 0.25, GPU_I_ID="1", GPU_I_PROFILE="1c.3g.40gb"),
            row(power, 0.5),
            row(dram, 0.5),
        )
    )
    (instance,) = gpu.instances
    assert gpu.facts == {("gpu_power_watts", ()): 0.5, ("gpu_dram_active_ratio", ()): 0.5}
    assert instance.facts == {("gpu_dram_active_ratio", ()): 0.25}
    assert instance.gpu_slices == 3


@pytest.mark.parametrize(
    ("labels", "pods"),
    [
        ({"namespace": "llm", "pod": "chat-0", "container": "vllm"}, {"llm/chat-0"}),
        ({"pod_namespace": "llm", "pod_name": "chat-0"}, {"llm/chat-0"}),
        ({"namespace": "x", "exported_namespace": "llm", "exported_pod": "chat-0"}, {"llm/chat-0"}),
        ({"namespace": "", "pod": "", "container": ""}, set()),
        ({"pod": "chat-0"}, set()),
        ({}, set()),
    ],
)
def test_a_gpu_has_the_pods_of_its_rows(labels: dict[str, str], pods: set[str]) -> None:
    page = page_of(row("DCGM_FI_DEV_GPU_UTIL", 5, 0, **labels))
    assert gpu_of(page).pods == pods


def test_pods_of_instances_and_those_that_share_a_gpu_are_all_its_pods() -> None:
    (gpu,) = gpus_of(body("shared-by-pods")).gpus
    assert gpu.pods == {"n/pod-0", "n/pod-1"}
    instances = [
        row("DCGM_FI_DEV_FB_USED", 5, GPU_I_ID=str(n), namespace="llm", pod=f"chat-{n}")
        for n in (1, 2)
    ]
    assert gpu_of(page_of(*instances)).pods == {"llm/chat-1", "llm/chat-2"}


def test_rows_for_each_pod_count_once_and_a_pods_part_is_not_the_gpus() -> None:
    found = gpus_of(body("shared-by-pods"))
    (gpu,) = found.gpus
    assert gpu.facts == {
        ("gpu_power_watts", ()): 400,
        ("gpu_utilization_ratio", ()): 0.6,
        ("gpu_memory_used_bytes", ()): 4100 * MIB,
        ("gpu_memory_reserved_bytes", ()): 600 * MIB,
    }
    assert found.dropped == {"pods_disagree": 1}


def test_gpus_of_several_hosts_are_separate_by_uuid() -> None:
    rows = [row("DCGM_FI_DEV_GPU_TEMP", 30 + n, n, gpu="0") for n in range(3)]
    # Of two exporters that show one GPU the highest value counts.
    found = gpus_of(page_of(*rows, row("DCGM_FI_DEV_GPU_TEMP", 9, gpu="0", job="b")))
    assert found.gpus[0].facts == {("gpu_temperature_celsius", ("gpu",)): 30}
    assert found.dropped == {}
    assert [gpu.gpu for gpu in found.gpus] == [uuid_of(n) for n in range(3)]
    assert [gpu.index for gpu in found.gpus] == [0, 0, 0]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("DCGM_FI_DEV_GPU_TEMP", None),
        ('DCGM_FI_DEV_GPU_TEMP{gpu="0} 3', "line_malformed"),
        (row("DCGM_FI_DEV_GPU_TEMP", "hot"), "line_malformed"),
        (row("DCGM_FI_DEV_GPU_TEMP", "NaN"), "value_not_finite"),
        (row("DCGM_FI_DEV_GPU_TEMP", 3, UUID=""), "uuid_missing"),
        (row("DCGM_FI_DEV_SM_CLOCK", -1e308), "value_not_finite"),
        (row("DCGM_FI_DEV_XID_ERRORS", 79.5), "xid_malformed"),
    ],
)
def test_a_bad_row_is_counted_and_the_good_ones_are_used(line: str, reason: str | None) -> None:
    found = gpus_of(page_of(line, row("DCGM_FI_DEV_POWER_USAGE", 80)))
    (gpu,) = found.gpus
    assert gpu.facts == {("gpu_power_watts", ()): 80}
    assert found.dropped == ({reason: 1} if reason else {})


def test_all_names_of_the_last_xid_are_one_and_alone_make_a_gpu_silent() -> None:
    gpu = gpu_of(page_of(row("DCGM_FI_DEV_XID_ERRORS", 31), row("DCGM_FI_DEV_XID_ERROR", 31)))
    assert gpu.silent
    assert gpu.xids == {XidSeries.LAST: {31: 1}}


def test_a_page_of_too_many_gpus_keeps_those_that_are_known() -> None:
    many = [row("DCGM_FI_DEV_GPU_TEMP", 30, n) for n in range(MOST_GPUS + 5)]
    known = [uuid_of(MOST_GPUS + 4)]
    found = gpus_of(page_of(*many), known=known)
    uuids = {gpu.gpu for gpu in found.gpus}
    assert len(uuids) == MOST_GPUS
    assert uuids >= set(known)
    assert found.dropped == {"too_many_gpus": 5}


# Labels of a row

GPU = "GPU-1f2e3d4c-aaaa-bbbb-cccc-0123456789ab"
NAME_CHARACTERS: int = cast("String", gpu_samples.c.name.type).length or 0


@pytest.mark.parametrize(
    ("labels", "entity"),
    [
        # Spelled as NVML spells it, by the label names of all releases.
        *(
            ({"UUID": spelling}, Entity(GPU))
            for spelling in (
                GPU.upper(),
                GPU.lower(),
                GPU.removeprefix("GPU-"),
                GPU.replace("-", "").replace("GPU", "GPU-"),
                GPU.removeprefix("GPU-").replace("-", "").upper(),
                f" {GPU} ",
            )
        ),
        *(({"gpu": "0", label: GPU}, Entity(GPU)) for label in ("UUID", "uuid", "gpu_uuid")),
        # A UUID of another form is kept as it is.
        ({"UUID": "GPU-simulated-0"}, Entity("GPU-simulated-0")),
        ({"UUID": GPU, "GPU_I_PROFILE": "1g.10gb", "GPU_I_ID": "9"}, Entity(GPU, 9)),
        ({"UUID": GPU, "GPU_I_PROFILE": "", "GPU_I_ID": ""}, Entity(GPU)),
    ],
)
def test_labels_name_the_gpu_and_its_instance(labels: dict[str, str], entity: Entity) -> None:
    assert entity_of(labels) == entity


@given(st.uuids())
def test_two_spellings_of_one_uuid_are_one_gpu(uuid: object) -> None:
    assert entity_of({"UUID": f"GPU-{uuid}"}) == entity_of({"uuid": str(uuid).upper()})


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


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        ({"modelName": "NVIDIA H200"}, "NVIDIA H200"),
        ({"model_name": "NVIDIA H200"}, "NVIDIA H200"),
        ({}, ""),
        # Cut to what the database takes.
        ({"modelName": "x" * 5000}, "x" * NAME_CHARACTERS),
    ],
)
def test_the_name_of_the_model_has_the_labels_of_all_releases(
    labels: dict[str, str], name: str
) -> None:
    assert name_of(labels) == name


ONE_GPU = "ONE_GPU-0"
LAST, WINDOW, TOTAL = XidSeries.LAST, XidSeries.WINDOW, XidSeries.TOTAL


def new_in(*pages: XidLevels) -> list[Mapping[int, int]]:
    """The new Xids of each exposition, one after the other."""
    counts = XidCounts()
    return [counts.read(ONE_GPU, page, 1000.0 + step) for step, page in enumerate(pages)]


def last(xid: int) -> XidLevels:
    return {LAST: {xid: 1} if xid else {}}


def pages(series: XidSeries, *found: Levels) -> list[XidLevels]:
    return [{series: each} for each in found]


@pytest.mark.parametrize(
    ("expositions", "new"),
    [
        pytest.param([{LAST: {79: 1}, WINDOW: {79: 2}, TOTAL: {79: 5}}], [{}], id="first"),
        pytest.param([last(31)] * 3, [{}] * 3, id="last-that-stays"),
        pytest.param(
            [last(0), last(79), last(79), last(31), last(79)],
            [{}, {79: 1}, {}, {31: 1}, {79: 2}],
            id="last-that-changes",
        ),
        pytest.param([last(79), {}, last(79)], [{}] * 3, id="restart-with-the-same-last"),
        pytest.param([{}, last(79)], [{}, {79: 1}], id="after-none"),
        pytest.param(
            pages(WINDOW, {}, {31: 2}, {31: 5}, {31: 1}, {31: 2}, {}),
            [{}, {31: 2}, {31: 5}, {}, {31: 6}, {}],
            id="window-counts-its-gains",
        ),
        pytest.param(
            pages(WINDOW, {31: 2}, {}, {31: 2}), [{}, {}, {31: 2}], id="window-that-was-empty"
        ),
        pytest.param(
            pages(TOTAL, {31: 4}, {31: 6}, {31: 1}), [{}, {31: 2}, {31: 3}], id="total-that-falls"
        ),
        pytest.param(
            pages(TOTAL, {31: 4, 48: 1}, {48: 1}, {31: 4, 48: 1}), [{}] * 3, id="row-missing-once"
        ),
        pytest.param(
            [
                {LAST: {}, WINDOW: {}, TOTAL: {}},
                {LAST: {79: 1}, WINDOW: {}, TOTAL: {}},
                {LAST: {79: 1}, WINDOW: {79: 1}, TOTAL: {}},
                {LAST: {79: 1}, WINDOW: {79: 1}, TOTAL: {79: 1}},
            ],
            [{}, {79: 1}, {}, {}],
            id="one-error-in-series-of-different-speed",
        ),
        pytest.param(
            [{LAST: {}, TOTAL: {}}, {LAST: {31: 1}, TOTAL: {31: 3}}],
            [{}, {31: 3}],
            id="series-that-saw-most",
        ),
    ],
)
def test_new_errors_of_an_exposition(
    expositions: list[XidLevels], new: list[Mapping[int, int]]
) -> None:
    assert new_in(*expositions) == new


@given(st.lists(st.integers(min_value=0, max_value=20), min_size=1))
def test_a_total_counts_as_much_as_it_grew(grown: list[int]) -> None:
    totals = [sum(grown[: end + 1]) for end in range(len(grown))]
    found = new_in(*({TOTAL: {31: total}} for total in totals))
    assert max([page.get(31, 0) for page in found]) == sum(grown[1:])


def test_gpus_are_counted_apart_from_zero_where_there_are_series_about_xids() -> None:
    counts = XidCounts()
    zeros = {(f.XID_ERRORS.name, (str(xid),)): 0 for xid in COUNTED_XIDS}
    for gpu in ("a", "b"):
        counts.read(gpu, last(0), 1.0)
        assert counts.facts(gpu) == zeros
    assert counts.read("a", last(79), 2.0) == {79: 1}
    assert counts.read("b", last(0), 2.0) == {}
    assert counts.facts("b") == zeros
    counts.read("no series", {}, 1.0)
    assert counts.facts("no series") == counts.facts("never seen") == {}


@pytest.mark.parametrize(
    ("source", "rows", "found", "malformed"),
    [
        (LAST, [({}, 0.0)], {}, 0),
        (LAST, [({}, 79.0), ({"pod": "a"}, 79.0)], {79: 1}, 0),
        (LAST, [({}, 2.0**63)], {}, 0),
        (WINDOW, [({"window_size_in_ms": "300000"}, 0.0)], {}, 0),
        (WINDOW, [({"xid": "0"}, 3.0)], {}, 0),
        (WINDOW, [({"xid": "31"}, 2.0), ({"xid": "31", "GPU_I_ID": "1"}, 2.0)], {31: 2}, 0),
        (TOTAL, [({"xid": "31"}, 4.0), ({"xid": "48"}, 1.0)], {31: 4, 48: 1}, 0),
        # A row without a usable number is counted, and the others are used.
        *((LAST, [({}, value), ({}, 48.0)], {48: 1}, 1) for value in (79.5, -1.0, 1e9)),
        *(
            (TOTAL, [({"xid": xid}, 1.0), ({"xid": "48"}, 48.0)], {48: 48}, 1)
            for xid in ("many", "nan", "-3", "9" * 5000)
        ),
        (WINDOW, [({"xid": "31"}, -2.0), ({"xid": "48"}, 48.0)], {48: 48}, 1),
    ],
)
def test_rows_become_counts_by_xid(
    source: XidSeries,
    rows: list[tuple[Mapping[str, str], float]],
    found: Levels,
    malformed: int,
) -> None:
    dropped: Counter[str] = Counter()
    assert levels(source, rows, dropped) == found
    assert dropped["xid_malformed"] == dropped.total() == malformed


def test_a_card_without_a_sensor_in_its_memory_has_no_temperature_of_it() -> None:
    """dcgm-exporter on a T4, which writes 0 there."""
    gpu = gpu_of((FOREIGN / "60-dcgm-t4-590.prom").read_bytes())
    assert gpu.facts[f.TEMPERATURE.name, ("gpu",)] == 74
    assert (f.TEMPERATURE.name, ("memory",)) not in gpu.facts
    assert gpu.facts[f.POWER.name, ()] == pytest.approx(68.244)
    assert gpu.facts[f.ENERGY.name, ()] == pytest.approx(15_152_422.938)
    assert gpu.facts[f.MEMORY_USED.name, ()] == 5_120 * MIB
