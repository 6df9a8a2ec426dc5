"""The checks of ``tests/gpu`` on the CPU: what they find there is no fault of theirs."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support import device_checks
from tests.support.device_checks import BITS, check_bits
from tests.support.proof import matrix
from tests.support.simulated_device import SimulatedDevice
from tests.support.simulated_device.injected import simulated

pytestmark = pytest.mark.usefixtures("one_thread")
CHECKS: list[Callable[[str, Path], None]] = [
    device_checks.check_bits_of_torch,
    device_checks.check_visits,
    device_checks.check_runs_go_on_elsewhere,
    device_checks.check_snapshots,
    device_checks.check_gathered,
    device_checks.check_inference,
    device_checks.check_kept_views,
    device_checks.check_model_of_the_device,
    device_checks.check_adamw,
    device_checks.check_adamw_stopped,
    device_checks.check_saves,
    device_checks.check_guarded_save,
    device_checks.check_ranks,
]


@pytest.mark.parametrize("name", matrix([*BITS], usual=["float32"]))
def test_offloaded_training_has_the_bits_of_training_in_memory(name: str, tmp_path: Path) -> None:
    check_bits(name, "cpu", tmp_path)


@pytest.mark.parametrize(
    "check", matrix(CHECKS, usual=[device_checks.check_gathered, device_checks.check_saves])
)
def test_check_holds_on_the_cpu(check: Callable[[str, Path], None], tmp_path: Path) -> None:
    check("cpu", tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_state_that_a_device_updates_for_its_home_has_the_bits_of_training_in_memory(
    tmp_path: Path, seed: int | None
) -> None:
    with simulated(partial(SimulatedDevice, seed)):
        device_checks.check_visits("cpu", tmp_path)


@pytest.mark.parametrize(
    "check",
    [device_checks.check_inference, device_checks.check_kept_views],
    ids=lambda c: c.__name__,
)
def test_check_holds_on_a_simulated_device(
    check: Callable[[str, Path], None], tmp_path: Path
) -> None:
    with simulated(partial(SimulatedDevice, None)):
        check("cpu", tmp_path)
