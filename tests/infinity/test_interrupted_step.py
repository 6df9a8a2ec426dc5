"""An interrupt in ``step()``: the step was taken with all that belongs to it, or it was not."""

from __future__ import annotations

import pkgutil
import signal
from pathlib import Path
from typing import Any

import pytest

import infinity
from tests.support.models import Stack, seeded, vector_loss

LATE = ["infinity.autograd.versions.Versions.note", "infinity.model.advance_groups"]


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
        assert {*offloaded.steps} == {1}
        after = [parameter._version for parameter in model.parameters()]
        assert all(new > old for new, old in zip(after, before, strict=True))
        offloaded.optimizer.zero_grad()
        vector_loss(model, 1).backward()  # raises for weights that were changed by nobody
