"""The bounds of a step, and the formulas of the papers by the figures that these take from them."""

import pytest
from bounds.formulas import StepBounds, disk_seconds, efficiency, intensity, save_seconds

PEAK = 70e12


def test_efficiencies_are_those_of_section_4_of_zero_infinity() -> None:
    one = intensity(tokens=1024, batch=1, hidden=8192)
    assert efficiency(one.parameters, 70e9, PEAK) == pytest.approx(0.506, abs=1e-3)
    two = intensity(tokens=1024, batch=2, hidden=8192)
    assert efficiency(two.optimizer, 1.5e12, PEAK) > 0.9
    assert one.activations == 24 * 8192
    assert efficiency(one.activations, float("inf"), PEAK) == 1.0


def test_saves_scale_with_nodes_and_with_writers_until_their_disks_are_busy() -> None:
    one = save_seconds(10**12, writers=[8], ssd_write=10e9)
    assert one == pytest.approx(100.0)
    assert save_seconds(10**12, writers=[8] * 4, ssd_write=10e9) == pytest.approx(one / 4)
    slow = [save_seconds(10**12, writers=[n], ssd_write=10e9, writer_limit=4e9) for n in (1, 2, 4)]
    assert slow == pytest.approx([250.0, 125.0, 100.0])
    # A node with fewer writers has less to write; the others take as long as they do.
    uneven = save_seconds(10**12, writers=[8, 2], ssd_write=10e9)
    assert uneven == pytest.approx(80.0)


def test_a_step_is_as_long_as_its_longest_part_or_as_all_of_them() -> None:
    disks, together = disk_seconds(20, 10, ssd_read=10, ssd_write=10, ssd_together=10)
    assert (disks, together) == ({"reads": 2.0, "writes": 1.0}, 3.0)
    _, apart = disk_seconds(20, 10, ssd_read=10, ssd_write=10, ssd_together=float("inf"))
    assert apart == 2.0
    step = StepBounds(seconds={"computing": 2.5, **disks}, together_seconds=together)
    assert (step.least_seconds, step.most_seconds, step.limit) == (3.0, 5.5, "computing")
    assert StepBounds(seconds={"computing": 4.0, **disks}).least_seconds == 4.0
