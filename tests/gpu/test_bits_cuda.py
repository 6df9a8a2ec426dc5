"""Training offloaded from a GPU beside training in its memory, bit by bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support import device_checks
from tests.support.device_checks import BITS, check_bits, check_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("same_every_time"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("name", [*BITS])
def test_offloaded_training_has_the_bits_of_training_in_device_memory(
    name: str, tmp_path: Path
) -> None:
    check_bits(name, "cuda", tmp_path)


@pytest.mark.parametrize(
    "check",
    [
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
    ],
)
def test_check_holds_on_a_gpu(check: Callable[[str, Path], None], tmp_path: Path) -> None:
    check("cuda", tmp_path)


def test_compiled_blocks_have_the_bits_that_they_have_in_device_memory(tmp_path: Path) -> None:
    device_checks.check_compiled("cuda", tmp_path)


def test_two_processes_share_a_gpu_over_gloo(tmp_path: Path) -> None:
    """NCCL takes one rank on a GPU."""
    check_ranks("cuda", tmp_path)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second CUDA device")
def test_ranks_with_a_gpu_each_train_over_nccl(tmp_path: Path) -> None:
    check_ranks("cuda", tmp_path, backend="nccl")
