"""What the kernels refuse, before anything is touched, and in which words."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from swap.adam import AdamHyper
from swap.kernels import adam_step, merge_master, split_master, sum_of_squares

HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)


def _arguments(**changed: object) -> dict[str, Any]:
    return {
        "weight": torch.ones(8, dtype=torch.bfloat16),
        "rest": torch.zeros(8, dtype=torch.int16),
        "exp_avg": torch.zeros(8),
        "exp_avg_sq": torch.zeros(8),
        "grad": torch.ones(8, dtype=torch.bfloat16),
        "hyper": HYPER,
        **changed,
    }


@pytest.mark.parametrize(
    ("weight", "rest"),
    [
        (torch.bfloat16, None),
        (torch.float32, torch.float32),
        (torch.float16, torch.int16),
        (torch.float64, None),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_step_over_weights_that_cannot_be_kept_so_is_refused(
    weight: torch.dtype, rest: torch.dtype | None
) -> None:
    arguments = _arguments(
        weight=torch.ones(8, dtype=weight),
        rest=None if rest is None else torch.zeros(8, dtype=rest),
    )
    with pytest.raises(TypeError, match=f"weight is {weight} and rest {rest}; pass torch.bfloat16"):
        adam_step(**arguments)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("exp_avg", torch.float16, "exp_avg is torch.float16; pass torch.float32 or torch.bfl"),
        ("exp_avg_sq", torch.float64, "exp_avg_sq is torch.float64; pass torch.float32"),
        (
            "grad",
            torch.int16,
            "grad is torch.int16; pass torch.float32 or torch.bfloat16 or torch.float16",
        ),
    ],
)
def test_step_over_a_dtype_without_a_kernel_is_refused(
    name: str, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        adam_step(**_arguments(**{name: torch.ones(8, dtype=dtype)}))


NAMES = ["weight", "rest", "exp_avg", "exp_avg_sq", "grad"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.repeat_interleave(2)[::2], r"has stride 2; pass a contiguous tensor"),
        (lambda t: t.reshape(2, 4), r"has shape \(2, 4\) where \(8,\) is due; pass flat tensors"),
        (lambda t: t.to("meta"), r"is a torch.strided tensor on meta; pass a dense tensor on the"),
        (lambda t: t.to_sparse(), r"is a torch.sparse_coo tensor on cpu; pass a dense tensor on"),
    ],
    ids=["strided", "2-d", "meta", "sparse"],
)
def test_step_over_a_tensor_that_c_cannot_take_is_refused(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    arguments = _arguments()
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=f"{name} {message}"):
        adam_step(**arguments)
    other = "exp_avg_sq" if name == "exp_avg" else "exp_avg"
    assert not arguments[other].any(), "a refused step must touch nothing"


@pytest.mark.parametrize("name", NAMES[1:])
def test_step_over_tensors_of_unequal_length_is_refused(name: str) -> None:
    arguments = _arguments()
    arguments[name] = arguments[name][:7]
    with pytest.raises(ValueError, match=rf"{name} has shape \(7,\) where \(8,\) is due"):
        adam_step(**arguments)


@pytest.mark.parametrize("threads", [0, -1])
def test_kernels_on_no_thread_are_refused(threads: int) -> None:
    message = f"threads={threads} must be 1 or more"
    with pytest.raises(ValueError, match=message):
        adam_step(**_arguments(threads=threads))
    with pytest.raises(ValueError, match=message):
        sum_of_squares(torch.ones(3), threads=threads)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lr", -1.0, r"lr=-1.0 must be 0 or more"),
        ("lr", float("nan"), r"lr=nan must be 0 or more"),
        ("eps", -1e-8, r"eps=-1e-08 must be 0 or more"),
        ("weight_decay", -0.1, r"weight_decay=-0.1 must be 0 or more"),
        ("beta1", 1.0, r"beta1=1.0 must be in \[0, 1\)"),
        ("beta2", -0.1, r"beta2=-0.1 must be in \[0, 1\)"),
        ("step", 0, r"step=0 must be 1 or more; the first step is number 1"),
    ],
)
def test_hyper_out_of_range_is_refused(field: str, value: float, message: str) -> None:
    change: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=message):
        replace(HYPER, **change)


def test_split_and_merge_of_wrong_dtypes_are_refused() -> None:
    master, hi, lo = torch.ones(4), torch.ones(4).bfloat16(), torch.ones(4).short()
    with pytest.raises(TypeError, match=r"master is torch.float64; pass torch.float32"):
        split_master(master.double(), hi, lo)
    with pytest.raises(TypeError, match=r"hi is torch.float16; pass torch.bfloat16"):
        split_master(master, hi.half(), lo)
    with pytest.raises(TypeError, match=r"lo is torch.int32; pass torch.int16"):
        merge_master(hi, lo.int(), master)
    with pytest.raises(TypeError, match=r"out is torch.bfloat16; pass torch.float32"):
        merge_master(hi, lo, hi)


def test_split_and_merge_of_unequal_lengths_are_refused() -> None:
    master, hi, lo = torch.ones(4), torch.ones(4).bfloat16(), torch.ones(4).short()
    with pytest.raises(ValueError, match=r"lo has shape \(3,\) where \(4,\) is due"):
        split_master(master, hi, lo[:3])
    with pytest.raises(ValueError, match=r"out has shape \(3,\) where \(4,\) is due"):
        merge_master(hi, lo, master[:3])


def test_sum_over_integers_is_refused() -> None:
    with pytest.raises(TypeError, match=r"grad is torch.int64; pass torch.float32 or"):
        sum_of_squares(torch.ones(3, dtype=torch.int64))
