"""What ``offload`` returns is entered once, and stays entered until it is left."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import offloading
from infinity.autograd.module_hooks import ModelHooks
from infinity.autograd.versions import Versions
from infinity.values.buffers.conversion import BufferConversion
from swap.tiered import TieredState
from tests.support.models import Stack, seeded, vector_loss
from tests.support.scripts import Script
from tests.support.training import same_bits, values_of

_FORGETFUL = """
import gc, sys
from pathlib import Path
import infinity
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import least_budget, same_bits, values_of

def train(model, offloaded):
    for step in range(2):
        gc.collect()
        vector_loss(model, step).backward()
        offloaded.step()

nvme = Path(sys.argv[1])
least = least_budget(Stack, nvme)
other = seeded(Stack)
with infinity.offload(other, nvme, host_memory=least) as offloaded:
    train(other, offloaded)
model = seeded(Stack)
offloaded = infinity.offload(model, nvme, host_memory=least).__enter__()
train(model, offloaded)
assert list(nvme.rglob("*.swap"))
with offloaded.gathered():
    values = values_of(model)
assert all(same_bits(value, values[name]) for name, value in values_of(other).items())
"""


def test_a_block_that_nobody_keeps_trains_on_warns_at_the_end_and_leaves_no_file(
    nvme: Path,
) -> None:
    script = Script(_FORGETFUL, nvme, ends_interpreter=True)
    _, errors = script.end()
    assert script.returncode == 0, errors
    assert "the offload block of a Stack was never left" in errors


_LEFT_BY_A_FINALIZER = """
import sys
from contextlib import ExitStack
import infinity
from tests.support.models import Stack, vector_loss

class Trainer:
    def __init__(self, nvme):
        self.model, self.stack, self.itself = Stack(), ExitStack(), self
        self.offloaded = self.stack.enter_context(infinity.offload(self.model, nvme))
    def __del__(self, say=print):
        self.stack.close()
        say("closed", flush=True)

trainer = Trainer(sys.argv[1])
vector_loss(trainer.model, 0).backward()
trainer.offloaded.step()
"""


def test_a_finalizer_at_the_end_of_the_interpreter_may_leave_a_block(nvme: Path) -> None:
    script = Script(_LEFT_BY_A_FINALIZER, nvme, ends_interpreter=True)
    printed, errors = script.end()
    assert (script.returncode, printed) == (0, "closed\n"), errors
    assert "the offload block of a Stack was never left" in errors


def test_using_what_offload_returns_before_it_is_entered_names_the_remedy(nvme: Path) -> None:
    block = infinity.offload(Stack(), nvme)
    for use in ("step", "optimizer", "backward"):
        with pytest.raises(AttributeError, match=r"with infinity\.offload") as error:
            getattr(block, use)
        assert f"offloaded.{use}" in str(error.value)
    assert not hasattr(block, "step")


def test_a_block_is_entered_once(nvme: Path) -> None:
    model = Stack()
    block = infinity.offload(model, nvme)
    with block:
        with pytest.raises(RuntimeError, match="entered before"), block:
            pass
        assert "entered" in repr(block)
        vector_loss(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"call infinity\.offload"), block:
        pass
    assert "left" in repr(block)


def test_a_block_that_could_not_be_entered_leaves_the_model_alone(nvme: Path) -> None:
    model = seeded(Stack)
    before = values_of(model)
    with pytest.raises(infinity.BudgetError), infinity.offload(model, nvme, host_memory=1):
        pass
    assert all(same_bits(value, before[name]) for name, value in values_of(model).items())


@pytest.mark.parametrize("late", ["add_gradient", "attach", "watch"])
def test_entering_that_fails_leaves_the_model_its_gradients(
    nvme: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    model = seeded(Stack)
    vector_loss(model, 0).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    owner = {"add_gradient": TieredState, "attach": ModelHooks, "watch": Versions}[late]

    def fail(*_: object) -> None:
        raise OSError("not today")

    monkeypatch.setattr(owner, late, fail)
    with pytest.raises(OSError, match="not today"), infinity.offload(model, nvme):
        pass
    after = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert before.keys() == after.keys() != set()
    assert all(same_bits(before[name], gradient) for name, gradient in after.items())


@pytest.mark.parametrize(
    ("owner", "what"),
    [
        pytest.param(offloading, "values_for", id="as it looks at the model"),
        pytest.param(offloading, "fill_all", id="as it reads the values"),
        pytest.param(BufferConversion, "__exit__", id="as it ends, all values given back"),
    ],
)
def test_block_that_begins_beside_another_of_the_model_is_refused(
    nvme: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, what: str
) -> None:
    """It would take what the other trains for what the model came with."""
    model, expected = seeded(Stack), seeded(Stack)
    _train(expected, nvme)
    is_there, may_go_on = threading.Event(), threading.Event()
    call: Callable[..., Any] = getattr(owner, what)

    def late(*arguments: Any, **options: Any) -> Any:
        is_there.set()
        assert may_go_on.wait(20)
        return call(*arguments, **options)

    monkeypatch.setattr(owner, what, late)
    with ThreadPoolExecutor(1) as other:
        training = other.submit(_train, model, nvme)
        assert is_there.wait(20)
        try:
            for same in (model, nn.Sequential(nn.Linear(1, 1), model.layers[1])):
                with pytest.raises(ValueError, match=r"[01]\.weight is offloaded already"):
                    infinity.offload(same, nvme).__enter__()
        finally:
            may_go_on.set()
        training.result(20)
    found = values_of(model)
    assert all(same_bits(value, found[name]) for name, value in values_of(expected).items())
    _train(model, nvme)  # it is nobody's any more


def test_block_that_begins_as_another_has_made_tiles_is_refused(nvme: Path) -> None:
    """The tiles were nobody's until they were offloaded."""
    model = nn.Sequential(nn.Linear(256, 512, bias=False))
    refused: list[str] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        if not refused:
            refused.append("")
            with pytest.raises(ValueError, match="offloaded already") as error:
                infinity.offload(model, nvme).__enter__()
            refused.append(str(error.value))
        return torch.optim.SGD(parameters, lr=0.1)

    with infinity.offload(model, nvme, optimizer=make, max_parameter_bytes=1 << 18):
        assert refused[1].startswith("0.tiles.0.weight is offloaded already")
    with infinity.offload(model, nvme, max_parameter_bytes=1 << 18):
        pass  # it is nobody's any more


def _train(model: nn.Module, nvme: Path) -> None:
    with infinity.offload(model, nvme) as offloaded:
        vector_loss(model, 0).backward()
        offloaded.step()
