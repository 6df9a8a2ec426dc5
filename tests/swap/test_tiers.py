"""Sizes in and out of text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swap.tiers import BudgetError, format_bytes, parse_bytes

FACTORS = {
    "": 1,
    "B": 1,
    "KB": 1000,
    "kB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KiB": 1024,
    "MiB": 1024**2,
    "gib": 1024**3,
    "TiB": 1024**4,
}
units = st.sampled_from(sorted(FACTORS))
spaces = st.sampled_from(["", " ", "  "])


@given(number=st.integers(1, 1 << 40), unit=units, before=spaces, between=spaces, after=spaces)
def test_whole_numbers_with_a_unit_are_exact(
    number: int, unit: str, before: str, between: str, after: str
) -> None:
    text = f"{before}{number}{between}{unit}{after}"
    assert parse_bytes(text) == number * FACTORS[unit]
    assert parse_bytes(number) == number


@given(number=st.floats(1, 1 << 20), unit=units)
def test_fractions_are_rounded_down(number: float, unit: str) -> None:
    assert parse_bytes(f"{number!r}{unit}") == int(number * FACTORS[unit])


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GiB",
        "many",
        "1 PB",
        "16 G iB",
        "1.2.3",
        "12GiBGiB",
        "nan",
        "inf",
        "1e400GB",
        "0",
        "-5",
        "-1GiB",
        "0.4",
        "1,5GB",
    ],
)
def test_text_that_is_no_positive_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="host_memory") as caught:
        parse_bytes(text, name="host_memory")
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("size", [0, -1, True, False])
def test_number_that_is_no_positive_size_is_refused_by_name(size: int) -> None:
    with pytest.raises(ValueError, match="host_memory"):
        parse_bytes(size, name="host_memory")


@pytest.mark.parametrize("size", [1.5, 8e9, None, b"16GiB", ["16GiB"]])
def test_other_types_are_refused_by_name(size: object) -> None:
    with pytest.raises(TypeError, match="host_memory"):
        parse_bytes(size, name="host_memory")  # type: ignore[arg-type]


@given(nbytes=st.integers(0, 1 << 60))
def test_format_bytes_is_within_half_a_percent(nbytes: int) -> None:
    number, unit = format_bytes(nbytes).split()
    assert abs(float(number) * FACTORS.get(unit, 1024**3) - nbytes) <= max(0.005 * nbytes, 0.5)
    assert unit == "TiB" or float(number) <= 1024


def test_budget_error_is_a_value_error_with_the_budget_that_works() -> None:
    error = BudgetError("too small", least_host_bytes=123)
    assert isinstance(error, ValueError)
    assert error.least_host_bytes == 123
