"""Values of a state dict go into an offloaded model by their names, and what does not fit is told
before any is set.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.integrations.state_dicts import OffloadedStateDict, set_values


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.clone() + 1 if value.is_floating_point() else value.clone()
        for name, value in model.state_dict().items()
    }


Change = Callable[[dict[str, torch.Tensor]], object]
WRONG: dict[str, tuple[Change, bool, str]] = {
    "missing": (lambda v: v.pop("norm.weight"), True, "there are no values for norm.weight"),
    "unexpected": (lambda v: v.update(more=torch.ones(1)), True, "the model has no more"),
    "shape": (lambda v: v.update({"norm.bias": torch.ones(5)}), False, r"norm.bias is of shape"),
}


@pytest.mark.parametrize("case", WRONG)
def test_values_that_do_not_fit_are_named_and_none_is_set(case: str, tmp_path: Path) -> None:
    change, strict, message = WRONG[case]
    model = _Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    values = _values(model)
    change(values)
    with infinity.offload(model, nvme=tmp_path, host_memory="64MiB") as offloaded:
        with pytest.raises(ValueError, match=message):
            set_values(offloaded, values, strict=strict)
        here = dict(OffloadedStateDict(offloaded))
    assert here
    assert all(torch.equal(here[name], before[name]) for name in here)


def test_a_weight_of_two_names_may_be_given_by_both(tmp_path: Path) -> None:
    model = _Tied()
    values = _values(model)
    assert {"embedding.weight", "head.weight"} <= values.keys()
    with infinity.offload(model, nvme=tmp_path, host_memory="64MiB") as offloaded:
        set_values(offloaded, values, strict=True)
    after = model.state_dict()
    assert all(torch.equal(after[name], values[name]) for name in values)


def test_without_strict_what_both_have_is_set(tmp_path: Path) -> None:
    model = _Tied()
    before, values = model.norm.bias.detach().clone(), _values(model)
    del values["norm.bias"]
    values["more"] = torch.ones(1)
    with infinity.offload(model, nvme=tmp_path, host_memory="64MiB") as offloaded:
        set_values(offloaded, values, strict=False)
    assert torch.equal(model.norm.bias, before)
    assert torch.equal(model.norm.weight, values["norm.weight"])
