"""The formulas of the papers, by the figures that the papers take from them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator.analytic import efficiency, intensity, needed_bandwidth, save_seconds, shares_of

PEAK = 70e12


def test_efficiencies_are_those_of_section_4_of_zero_infinity() -> None:
    one = intensity(tokens=1024, batch=1, hidden=8192)
    assert efficiency(one.parameters, 70e9, PEAK) == pytest.approx(0.506, abs=1e-3)
    two = intensity(tokens=1024, batch=2, hidden=8192)
    assert efficiency(two.optimizer, 1.5e12, PEAK) > 0.9
    assert one.activations == 24 * 8192
    assert efficiency(one.activations, float("inf"), PEAK) == 1.0


@given(ait=st.floats(1, 1e6), wanted=st.floats(0.01, 0.99))
def test_the_bandwidth_that_an_efficiency_needs_gives_it(ait: float, wanted: float) -> None:
    assert efficiency(ait, needed_bandwidth(ait, PEAK, wanted), PEAK) == pytest.approx(wanted)


@given(num_bytes=st.integers(0, 10**15), writers=st.integers(1, 5000))
def test_writers_share_a_checkpoint_to_the_byte(num_bytes: int, writers: int) -> None:
    shares = shares_of(num_bytes, writers)
    assert sum(shares) == num_bytes
    assert max(shares) - min(shares) <= 1


def test_saves_scale_with_nodes_and_with_writers_until_their_disks_are_busy() -> None:
    one = save_seconds(10**12, writers=[8], ssd_write=10e9)
    assert one == pytest.approx(100.0)
    assert save_seconds(10**12, writers=[8] * 4, ssd_write=10e9) == pytest.approx(one / 4)
    slow = [save_seconds(10**12, writers=[n], ssd_write=10e9, writer_limit=4e9) for n in (1, 2, 4)]
    assert slow == pytest.approx([250.0, 125.0, 100.0])
    # A node with fewer writers has less to write; the others take as long as they do.
    uneven = save_seconds(10**12, writers=[8, 2], ssd_write=10e9)
    assert uneven == pytest.approx(80.0)
