"""Classes of parameters that answer operations of torch by themselves: inside the block parameters
have a class of the library, so that what these compute would be lost without a word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._mode_utils import no_dispatch

import infinity
from tests.support.training import WHOLE, same_bits


class _Doubled(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.linear else result


class _Dispatched(nn.Parameter):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        with no_dispatch():
            return func(*args, **(kwargs or {}))


class _Marked(nn.Parameter):
    pass


def _layer(kind: Any) -> nn.Linear:
    layer = nn.Linear(192, 192)
    layer.weight = kind(layer.weight.detach())
    return layer


@pytest.mark.parametrize("kind", [_Doubled, _Dispatched])
def test_a_class_with_functions_of_its_own_is_refused_by_name(nvme: Path, kind: Any) -> None:
    model = _layer(kind)
    words = rf"weight is a {kind.__name__}, whose __torch_.*as_subclass\(torch.Tensor\)"
    with pytest.raises(TypeError, match=words):
        infinity.plan(model, host_memory=WHOLE)
    with (
        pytest.raises(TypeError, match=words),
        infinity.offload(model, nvme, host_memory=WHOLE),
    ):
        pass
    assert type(model.weight) is kind
    model.weight = nn.Parameter(model.weight.detach().as_subclass(torch.Tensor).clone())
    values = model.weight.detach().clone()
    with infinity.offload(model, nvme, host_memory=WHOLE):
        assert same_bits(model.weight.detach(), values)


def test_a_class_without_any_is_there_again_after_the_block(nvme: Path) -> None:
    model = _layer(_Marked)
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        model(torch.ones(2, 192)).sum().backward()
        offloaded.step()
    assert type(model.weight) is _Marked
