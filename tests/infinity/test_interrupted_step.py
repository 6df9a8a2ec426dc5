"""An interrupt in ``step()``: the step was taken with all that belongs to it, or it was not."""

from __future__ import annotations

import pkgutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import same_bits, values_of

LATE = ["infinity.autograd.versions.Versions.note", "infinity.optim.adamw.AdamRule.advance"]


@pytest.mark.parametrize("function", LATE)
def test_interrupt_after_a_step_was_taken_leaves_nothing_of_it_undone(
    function: str, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(Stack)
    done = []
    with infinity.offload(model, nvme, host_memory="64MiB") as offloaded:
        vector_loss(model, 0).backward()
        before = [parameter._version for parameter in model.parameters()]
        name, _, attribute = function.rpartition(".")
        original = pkgutil.resolve_name(function)

        def interrupted(*args: Any) -> None:
            signal.raise_signal(signal.SIGINT)
            original(*args)
            done.append(attribute)

        with monkeypatch.context() as patch:
            patch.setattr(f"{name}.{attribute}", interrupted)
            with pytest.raises(KeyboardInterrupt):
                offloaded.step()
        assert done == [attribute]
        assert {*offloaded._training.steps} == {1}
        after = [parameter._version for parameter in model.parameters()]
        assert all(new > old for new, old in zip(after, before, strict=True))
        offloaded.optimizer.zero_grad()
        vector_loss(model, 1).backward()  # raises for weights that were changed by nobody


def test_training_goes_on_when_an_interrupt_kept_step_from_clearing_gradients(
    nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(is_interrupted: bool) -> dict[str, torch.Tensor]:
        model = seeded(Stack)
        with infinity.offload(model, nvme, host_memory="64MiB") as offloaded:
            for number in range(3):
                vector_loss(model, number).backward()
                if number == 1 and is_interrupted:
                    with monkeypatch.context() as patch:
                        patch.setattr(offloaded.optimizer, "zero_grad", interrupted)
                        with pytest.raises(KeyboardInterrupt):
                            offloaded.step()
                else:
                    offloaded.step()
            assert {*offloaded._training.steps} == {3}
        return values_of(model)

    def interrupted() -> None:
        raise KeyboardInterrupt

    expected, found = train(False), train(True)
    assert all(same_bits(value, found[name]) for name, value in expected.items())


def test_gradients_on_top_of_a_step_of_the_optimizer_alone_are_refused(nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory="64MiB") as offloaded:
        vector_loss(model, 0).backward()
        offloaded.step()
        vector_loss(model, 1).backward()
        offloaded.optimizer.step()
        with pytest.raises(RuntimeError, match="zero_grad"):
            vector_loss(model, 2).backward()
