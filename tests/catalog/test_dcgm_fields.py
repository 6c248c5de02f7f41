"""The table of fields of dcgm-exporter."""

from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.catalog import gpu_facts as f
from agent.catalog.dcgm_fields import (
    DCGM_FIELDS,
    DcgmField,
    is_blank,
)
from agent.catalog.gpu_facts import GPU_FACTS, THROTTLE_REASONS
from agent.errors import SettingsInvalid
from agent.sources.nvml.sample_parts import FIELDS

FACTS = {fact.name: fact for fact in GPU_FACTS}
# DCGM has a sum over links or a rate, in other units: see the docstring of the table.
WITHOUT_SERIES = {
    f.PCIE_TRANSMITTED.name,
    f.PCIE_RECEIVED.name,
    f.NVLINK_TRANSMITTED.name,
    f.NVLINK_RECEIVED.name,
}
SET_BY_THE_SOURCE = {f.UP.name, f.XID_ERRORS.name, f.XID_LAST_SEEN.name}


def test_every_fact_has_a_series_except_the_excluded_ones() -> None:
    converted = {field.fact for field in DCGM_FIELDS}
    assert converted == FACTS.keys() - WITHOUT_SERIES - SET_BY_THE_SOURCE


def test_labels_equal_those_of_nvml() -> None:
    of_nvml = {(fact, labels) for fact, labels in (field.key for field in FIELDS) if labels}
    of_dcgm = {field.key for field in DCGM_FIELDS}
    assert of_nvml <= of_dcgm
    reasons = {
        field.bit: field.labels[0] for field in DCGM_FIELDS if field.fact == f.THROTTLE_ACTIVE.name
    }
    assert reasons == THROTTLE_REASONS


@pytest.mark.parametrize(
    ("series", "value", "converted"),
    [
        ("DCGM_FI_DEV_FB_FREE", 1, 1048576),
        ("DCGM_FI_DEV_FB_FREE_BYTES", 1048576, 1048576),
        ("DCGM_FI_DEV_FB_CAPACITY_BYTES", 1048576, 1048576),
        ("DCGM_FI_DEV_MEMORY_UTIL_RATIO", 0.5, 0.5),
        ("DCGM_FI_DEV_MEM_COPY_UTIL", 50, 0.5),
        ("DCGM_FI_DEV_GPU_UTIL", 75, 0.75),
        ("DCGM_FI_DEV_POWER_USAGE", 78.5, 78.5),
        ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 2500, 2.5),
        ("DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", 2500, 2500),
        ("DCGM_FI_DEV_SM_CLOCK", 1980, 1.98e9),
        ("DCGM_FI_DEV_SM_CLOCK_HERTZ", 1.98e9, 1.98e9),
        ("DCGM_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP_NS", 2e9, 2),
        ("DCGM_FI_PROF_DRAM_ACTIVE", 0.5, 0.5),
    ],
)
def test_values_are_in_base_units(series: str, value: float, converted: float) -> None:
    (field,) = [field for field in DCGM_FIELDS if field.series == series]
    assert field.read(value) == pytest.approx(converted)


@pytest.mark.parametrize(
    ("given", "problems"),
    [
        ({"fact": "gpu_clock_herz"}, ["no fact 'gpu_clock_herz'; is it 'gpu_clock_hertz'?"]),
        ({"fact": "gpu_energy_joules_total"}, ["is it 'gpu_energy_joules'?"]),
        ({"fact": "gpu_up"}, ["no fact 'gpu_up'"]),
        ({"fact": "gpu_clock_hertz"}, ["labels [] do not fit the fact 'gpu_clock_hertz'"]),
        ({"fact": "gpu_clock_hertz", "labels": ("",)}, ["labels [''] do not fit"]),
        ({"labels": ("sm",)}, ["labels ['sm'] do not fit"]),
        *(({"scale": scale}, [f"scale {scale!r} must be"]) for scale in (0.0, -1.0, nan, inf)),
        *(({"series": text}, [repr(text)]) for text in ("", "MINE{}", "9A", "MY SERIES", "naïve")),
        (
            {"series": "MY SERIES", "fact": "fan", "scale": 0},
            ["'MY SERIES'", "scale 0 must be", "no fact 'fan'; docs/gpus.md lists them"],
        ),
    ],
)
def test_every_problem_of_an_operators_field_is_reported_with_its_value(
    given: dict[str, Any], problems: list[str]
) -> None:
    with pytest.raises(SettingsInvalid) as refused:
        DcgmField(**{"series": "MINE", "fact": "gpu_power_watts", **given})
    assert len(refused.value.problems) == len(problems)
    for found, problem in zip(refused.value.problems, problems, strict=True):
        assert problem in found


# As DCGM writes them; values from dcgm_structs.h.
@pytest.mark.parametrize(
    ("form", "first", "blanks"),
    [("d", 2**31 - 16, 4), (".6f", 2**47, 4), ("d", 2**63 - 16, 2**20)],
)
@given(data=st.data())
def test_a_blank_of_each_width_is_no_value(
    form: str, first: int, blanks: int, data: st.DataObject
) -> None:
    blank = data.draw(st.integers(first, first + blanks - 1))
    assert is_blank(float(format(blank, form)))


@given(
    st.integers(-100, 2**62) | st.sampled_from([2**31 - 17, 2**31 - 12, 2**47 - 1, 2**47 + 4]),
    st.sampled_from(["d", ".6f"]),
)
def test_an_ordinary_number_is_a_value(number: int, form: str) -> None:
    blank = 0 <= number - (2**31 - 16) < 4 or 0 <= number - 2**47 < 4
    assert is_blank(float(format(number, form))) == blank
