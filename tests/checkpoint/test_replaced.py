"""Memory that goes away while a save still has to read it: the save is an error that names the
tensor, and never garbage, and the checkpoint before it stays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
from checkpoint.plan.state_plan import plan_files, plan_state
from checkpoint.plan.write_runs import Run
from checkpoint.transfer.filling import Filler

MIB = 1 << 20


class Gate:
    """A source that is read when the test lets it, ahead of all that follows it."""

    dtype = torch.uint8
    shape = (4 * MIB,)

    def __init__(self) -> None:
        self.opened = threading.Event()

    def read(self, start: int, out: memoryview) -> None:
        assert self.opened.wait(60)
        out[:] = bytes(len(out))


def assign(parameter: torch.nn.Parameter) -> None:
    parameter.data = parameter.data * 2


def free(parameter: torch.nn.Parameter) -> None:
    parameter.untyped_storage().resize_(0)


def grow(parameter: torch.nn.Parameter) -> None:
    parameter.untyped_storage().resize_(2 * parameter.untyped_storage().nbytes())


def swap(parameter: torch.nn.Parameter) -> None:
    torch.utils.swap_tensors(parameter, torch.nn.Parameter(parameter.detach() * 2))


def give_other_storage(parameter: torch.nn.Parameter) -> None:
    with torch.no_grad():
        parameter.set_(torch.zeros(1))  # type: ignore[call-overload]


@pytest.mark.parametrize("replace", [assign, free, grow, swap, give_other_storage])
@pytest.mark.parametrize("numel", [1 << 10, 1 << 20], ids=["small", "large"])
def test_a_parameter_that_gets_other_memory_before_it_is_read_is_an_error_with_its_name(
    tmp_path: Path, numel: int, replace: Callable[[torch.nn.Parameter], None]
) -> None:
    parameters = [torch.nn.Parameter(torch.full((numel,), float(k))) for k in range(4)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    checkpoint.save({"x": 1}, tmp_path / "run")
    gate = Gate()
    state = {"gate": gate, "p": parameters}
    pending = checkpoint.save_async(state, tmp_path / "run", guard=optimizer)
    for parameter in parameters:
        replace(parameter)
    others = [torch.full((numel,), 777.0) for _ in range(8)]
    gate.opened.set()
    with pytest.raises(checkpoint.ChangedTensorError, match=r"'p\.0' was changed"):
        pending.result()
    assert len(others) == 8
    assert checkpoint.load(tmp_path / "run") == {"x": 1}


def test_what_a_state_dict_holds_is_saved_as_it_was_when_the_module_got_other_memory(
    tmp_path: Path,
) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    expected = model.weight.detach().clone()
    gate = Gate()
    state = {"gate": gate, "model": model.state_dict()}
    pending = checkpoint.save_async(state, tmp_path / "run", guard=optimizer)
    model.double()
    gate.opened.set()
    pending.result()
    assert torch.equal(
        checkpoint.load(tmp_path / "run", only="model.*")["model"]["weight"], expected
    )


@pytest.mark.parametrize("shape", [(1 << 20,), (1 << 10, 1 << 10)], ids=["row", "turned"])
def test_an_array_that_is_resized_before_it_is_read_is_an_error_with_its_name(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    array = np.zeros(shape, order="F")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    gate = Gate()
    state = {"gate": gate, "array": array}
    pending = checkpoint.save_async(state, tmp_path / "run", guard=optimizer)
    array.resize((1,), refcheck=False)
    gate.opened.set()
    with pytest.raises(checkpoint.ChangedTensorError, match="'array' was changed"):
        pending.result()


def filled_with(tensor: torch.Tensor) -> tuple[Filler, list[Run], np.ndarray]:
    plan = plan_state({"x": tensor})
    (file,) = plan_files(plan, uuid="0" * 8, rank=0, weights=[1.0])
    filler = Filler(file, plan.sources_of(file))
    runs = list(filler.runs(8 * MIB, memory_alignment=4))
    return filler, runs, np.empty(8 * MIB, np.uint8)


def test_memory_that_was_freed_is_not_read_however_a_run_is_read() -> None:
    tensor = torch.zeros(MIB)
    filler, runs, buffer = filled_with(tensor)
    direct = next(run for run in runs if run.direct)
    before = filler.sum_direct(direct)
    tensor.untyped_storage().resize_(0)
    copied = Run(direct.offset, direct.nbytes, False, direct.pieces)
    for read in (
        lambda: filler.sum_direct(direct),
        lambda: filler.check_direct(direct, before),
        lambda: filler.fill(copied, buffer),
        lambda: filler.copy(copied, buffer),
    ):
        with pytest.raises(checkpoint.ChangedTensorError, match="'x'"):
            read()
