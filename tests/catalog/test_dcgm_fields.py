"""The table of fields of dcgm-exporter."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.catalog import gpu_facts as f
from agent.catalog.dcgm_fields import (
    DCGM_FIELDS,
    XID_LAST,
    XID_TOTAL,
    XID_WINDOW,
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


def test_a_field_fits_its_fact() -> None:
    for field in DCGM_FIELDS:
        assert len(field.labels) == len(FACTS[field.fact].labels)
        assert re.fullmatch(r"DCGM_FI_[A-Z0-9_]+|dcgm_[a-z_]+", field.series)


def test_no_series_has_one_fact_twice() -> None:
    rows = [(field.series, field.key) for field in DCGM_FIELDS]
    assert len(set(rows)) == len(rows)


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


def test_xids_are_no_fields() -> None:
    assert not {*XID_LAST, XID_WINDOW, XID_TOTAL} & {field.series for field in DCGM_FIELDS}


def test_an_operator_can_add_a_series() -> None:
    field = DcgmField(series="MY_SM_CLOCK", fact="gpu_clock_hertz", labels=("sm",), scale=1e6)
    assert (field.key, field.read(1980)) == (("gpu_clock_hertz", ("sm",)), 1.98e9)


@pytest.mark.parametrize(
    ("fact", "labels", "message"),
    [
        ("gpu_clock_herz", ("sm",), "no fact 'gpu_clock_herz'; is it 'gpu_clock_hertz'?"),
        ("gpu_energy_joules_total", (), "is it 'gpu_energy_joules'?"),
        ("fan", (), r"no fact 'fan'; docs/gpus.md lists them"),
        ("gpu_up", (), "no fact 'gpu_up'"),
        ("gpu_clock_hertz", (), r"labels \[\] do not fit the fact 'gpu_clock_hertz', .* clock"),
        ("gpu_clock_hertz", ("",), r"labels \[''\] do not fit"),
        ("gpu_power_watts", ("sm",), r"labels \['sm'\] do not fit .* no label"),
    ],
)
def test_a_field_for_no_fact_is_refused_with_its_value(
    fact: str, labels: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SettingsInvalid, match=message):
        DcgmField(series="MINE", fact=fact, labels=labels)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_scale_is_refused(scale: float) -> None:
    with pytest.raises(SettingsInvalid, match=f"scale {scale!r} must be a number above 0"):
        DcgmField(series="MINE", fact="gpu_power_watts", scale=scale)


@pytest.mark.parametrize("series", ["", "MINE{}", "9A", "MY SERIES", "naïve"])
def test_an_invalid_series_name_is_refused(series: str) -> None:
    with pytest.raises(SettingsInvalid, match=re.escape(repr(series))):
        DcgmField(series=series, fact="gpu_power_watts")


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(SettingsInvalid) as caught:
        DcgmField(series="MY SERIES", fact="fan", scale=0)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("name", ["BLANK", "NOT_FOUND", "NOT_SUPPORTED", "NOT_PERMISSIONED"])
def test_a_blank_of_each_width_is_no_value(name: str) -> None:
    step = ("BLANK", "NOT_FOUND", "NOT_SUPPORTED", "NOT_PERMISSIONED").index(name)
    # As the exposition has them; values from dcgm_structs.h.
    for text in (
        f"{2147483632 + step}",
        f"{9223372036854775792 + step}",
        f"{140737488355328 + step}.000000",
    ):
        assert is_blank(float(text)), text


@pytest.mark.parametrize("first", [2**31 - 16, 2**47])
def test_the_numbers_next_to_the_blanks_are_values(first: int) -> None:
    assert not is_blank(first - 1)
    assert not is_blank(first + 4)


@given(st.integers(min_value=-100, max_value=2**62), st.sampled_from(["d", ".6f"]))
def test_an_ordinary_number_is_a_value(number: int, form: str) -> None:
    blank = 2147483632 <= number <= 2147483635 or 2**47 <= number <= 2**47 + 3
    assert is_blank(float(format(number, form))) == blank


@given(st.integers(min_value=2**63 - 16, max_value=2**63 + 2**20))
def test_every_number_from_the_widest_blank_on_is_blank(number: int) -> None:
    assert is_blank(float(number))
