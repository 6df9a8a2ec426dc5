"""Wherever torch takes a tensor, by whichever way, an offloaded weight or gradient has the right
values there, or an error names the parameter.
"""

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import _C, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.swa_utils import AveragedModel
from torch.utils import dlpack

import checkpoint
import infinity
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import WHOLE, least_budget

Ask = Callable[[Any], Any]


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0] * gradients[0]


class _Times(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0


def _set_data(w: Any) -> torch.Tensor:
    x = torch.zeros(w.shape)
    x.data = w
    return x * 1


def _in_part(w: Any) -> torch.Tensor:
    x = torch.zeros(w.shape)
    x[:] = w
    return x


def _as_gradient(w: Any) -> Any:
    x = torch.zeros(w.shape, requires_grad=True)
    (x * 1).backward(gradient=w)
    return x.grad


def _as_grad_output(w: Any) -> torch.Tensor:
    x = torch.zeros(w.shape, requires_grad=True)
    return torch.autograd.grad(x * 1, x, grad_outputs=w)[0]


def _as_tangent(w: Any) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.zeros(w.shape), w)
        return forward_ad.unpack_dual(dual * 1).tangent


def _kept_by_hooks(w: Any) -> Any:
    x = torch.ones(w.shape, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        y = x * w
    return torch.autograd.grad(y.sum(), x)[0]


def _saved(w: Any) -> Any:
    file = io.BytesIO()
    torch.save(w, file)
    file.seek(0)
    return torch.load(file)


def _from_vector(w: Any) -> Any:
    target = nn.Parameter(torch.zeros(w.shape))
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([w]), [target])
    return target


def _called_by(w: Any) -> Any:
    call = torch.func.functional_call
    linear = nn.Linear(w.shape[-1], w.shape[0], bias=False)
    return call(linear, {"weight": w}, torch.eye(w.shape[-1])).T


def _averaged(w: Any) -> Any:
    holder = nn.Module()
    holder.register_buffer("values", w.detach())
    return next(AveragedModel(holder).module.buffers())


def _asserted(w: Any) -> Any:
    torch.testing.assert_close(w, w.clone())
    return w.clone()


ENTRANCES: dict[str, Ask] = {
    "torch.tensor": torch.tensor,
    "as_tensor": torch.as_tensor,
    "asarray": torch.asarray,
    "new_tensor": lambda w: torch.ones(1).new_tensor(w),
    "torch.Tensor": torch.Tensor,
    "FloatTensor": torch.FloatTensor,
    "new": lambda w: torch.ones(1).new(w),
    "as_subclass": lambda w: w.as_subclass(torch.Tensor),
    "vmap": lambda w: torch.vmap(lambda row: row * 1)(w),
    "vmap around it": lambda w: torch.vmap(lambda row: row @ w, out_dims=0)(torch.eye(len(w))),
    "vmap of all of it": lambda w: torch.vmap(lambda row: w)(torch.zeros(1))[0],
    "jvp": lambda w: torch.func.jvp(lambda x: x * 1, (w,), (w,))[1],
    "jvp around it": lambda w: torch.func.jvp(lambda x: x * w, (w * 0,), (w * 0 + 1,))[1],
    "functionalize": lambda w: torch.func.functionalize(lambda x: x * 1)(w),
    "vjp": lambda w: torch.autograd.functional.vjp(lambda x: x * 1, w * 0, w)[1],
    "nested_tensor": lambda w: torch.nested.nested_tensor([w], layout=torch.strided).unbind()[0],
    "x.data =": _set_data,
    "x[:] =": _in_part,
    "copy_": lambda w: torch.empty(w.shape).copy_(w),
    "gradient=": _as_gradient,
    "grad_outputs=": _as_grad_output,
    "tangent": _as_tangent,
    "hooks of others": _kept_by_hooks,
    "autograd.Function": lambda w: _Doubled.apply(w) / 2,
    "detach().numpy": lambda w: w.detach().numpy(),
    "numpy(force)": lambda w: w.numpy(force=True),
    "numpy.array": lambda w: np.array(w.detach()),
    "from_dlpack": lambda w: dlpack.from_dlpack(w.detach()),
    "to_dlpack": lambda w: dlpack.from_dlpack(_C._to_dlpack(w)),
    "torch.save": _saved,
    "save of detach": lambda w: _saved(w.detach().clone()),
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "share_memory_": lambda w: w.share_memory_(),
    "tolist": lambda w: torch.tensor(w.tolist()),
    "Parameter": lambda w: nn.Parameter(w.detach()),
    "Parameter over it": nn.Parameter,
    "Embedding": lambda w: nn.Embedding.from_pretrained(w).weight,
    "make_fx": lambda w: make_fx(lambda x: x * w)(w.detach() * 0 + 1)(w.detach() * 0 + 1),
    "multiprocessing": lambda w: pickle.loads(ForkingPickler.dumps(w)),
    "foreach": lambda w: torch._foreach_mul([w], 1.0)[0],
    "aten": lambda w: torch.ops.aten.mul.Tensor(w, torch.ones(())),
    "_C._nn": lambda w: torch._C._nn.hardtanh(w, -1e9, 1e9),
    "script": lambda w: torch.jit.script(_Times())(w),
    "vectors": _from_vector,
    "functional_call": _called_by,
    "stacked rows": lambda w: torch.stack([*w]),
    "averaged": _averaged,
    "assert_close": _asserted,
    "isnan": lambda w: w.clone() if not torch.isnan(w).any() else None,
    "equal": lambda w: w.clone() if torch.equal(w, w.clone()) else None,
    "collate": lambda w: torch.utils.data.default_collate([w])[0],
    "histogram": lambda w: w.clone() if torch.isfinite(torch.histc(w.detach())).all() else None,
}
REFUSED_BY_TORCH = r"data pointer of Tensor"
"""What it says about pointers in general."""


@pytest.mark.filterwarnings("ignore")  # torch would have some of these done in other ways
@pytest.mark.parametrize("budget", ["whole", "least"])
def test_every_entrance_has_the_values_or_names_the_parameter(budget: str, nvme: Path) -> None:
    expected = dict(seeded(Stack).named_parameters())
    host_memory = WHOLE if budget == "whole" else least_budget(Stack, nvme)
    model, wrong = seeded(Stack), list[str]()
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        vector_loss(model, 0).backward()
        name = "layers.0.weight"
        weight = model.layer(0).weight
        gradient = offloaded.gradient(weight)
        for entrance, ask in ENTRANCES.items():
            for tensor, values in ((weight, expected[name]), (weight.grad, gradient)):
                assert values is not None
                try:
                    if not _same(ask(tensor), values):
                        wrong.append(f"{entrance} gave other values")
                except Exception as error:
                    if name not in str(error) and REFUSED_BY_TORCH not in str(error):
                        wrong.append(f"{entrance}: {error}")
    assert not wrong, "\n".join(wrong)


def _same(found: Any, values: torch.Tensor) -> bool:
    if isinstance(found, np.ndarray):
        found = torch.from_numpy(found.copy())
    return isinstance(found, torch.Tensor) and torch.equal(found.detach().clone(), values.detach())


@pytest.mark.parametrize("budget", ["whole", "least"])
def test_what_was_given_the_data_of_a_weight_is_not_written_to(budget: str, nvme: Path) -> None:
    host_memory = WHOLE if budget == "whole" else least_budget(Stack, nvme)
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=host_memory):
        vector_loss(model, 0).backward()
        weight = model.layer(0).weight
        x = torch.zeros(weight.shape)
        x.data = weight
        with pytest.raises(RuntimeError, match=r"layers\.0\.weight.*parameter\.detach\(\)"):
            x.add_(1)
        leaf = torch.zeros(weight.shape, requires_grad=True)
        leaf.data = weight
        with pytest.raises(RuntimeError, match=r"layers\.0\.weight"):
            _ = leaf * 2
        assert weight.grad is not None
        x.data = weight.grad
        with pytest.raises(RuntimeError, match=r"gradient of layers\.0\.weight.*clone\(\)"):
            _ = x + 1


def _by_numpy(p: Any) -> None:
    p.data.numpy()[...] = 0


def _by_data(p: Any) -> None:
    x = torch.zeros(p.shape)
    x.data = p.detach()
    x.zero_()


@pytest.mark.parametrize("change", [_by_numpy, _by_data])
@pytest.mark.parametrize("budget", ["whole", "least"])
def test_uncounted_change_of_a_copy_of_a_weight_is_told_once(
    budget: str, change: Ask, nvme: Path
) -> None:
    host_memory = WHOLE if budget == "whole" else least_budget(Stack, nvme)
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        weight = model.layer(0).weight
        kept = weight.data
        change(weight)
        with pytest.raises(RuntimeError, match=r"layers\.0\.weight was changed in place"):
            offloaded.step()
        kept.mul_(2)
        with pytest.raises(RuntimeError, match=r"layers\.0\.weight was changed in place"):
            offloaded.step()
        del kept
        vector_loss(model, 0).backward()
        offloaded.step()


def test_saving_what_stands_for_values_says_what_to_save(nvme: Path, tmp_path: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=WHOLE):
        vector_loss(model, 0).backward()
        weight: Any = model.layer(0).weight
        for name, tensor in (("weight", weight), ("gradient", weight.grad)):
            with pytest.raises(TypeError, match=rf"'{name}'.*tensor\.detach\(\)\.clone\(\)"):
                checkpoint.save({name: tensor}, tmp_path / name)
            checkpoint.save({name: tensor.detach().clone()}, tmp_path / name)
        loaded = checkpoint.load(tmp_path / "gradient")["gradient"]
        assert _same(weight.grad, loaded)


def test_what_takes_a_weight_is_not_compiled(host_memory: int, nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=host_memory):
        weight = model.layer(0).weight
        compiled = torch.compile(lambda x: x @ weight.t(), backend="eager")
        with pytest.raises(Exception, match=r"layers\.0\.weight.*torch\.compile"):
            compiled(torch.ones(2, weight.shape[1]))
        torch._dynamo.reset()


def test_what_takes_a_gradient_is_not_compiled(host_memory: int, nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=host_memory):
        vector_loss(model, 0).backward()
        compiled = torch.compile(lambda gradient: gradient * 2, backend="eager")
        with pytest.raises(Exception, match=r"gradient of layers\.0\.weight.*torch\.compile"):
            compiled(model.layer(0).weight.grad)
        torch._dynamo.reset()


@pytest.mark.parametrize("set_to", [torch.Tensor.set_, torch.ops.aten.set_.source_Tensor])
def test_tensor_is_not_set_to_the_memory_of_a_weight(
    set_to: Any, host_memory: int, nvme: Path
) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        weight = model.layer(0).weight
        with pytest.raises(RuntimeError, match=r"layers\.0\.weight.*parameter\.detach\(\)"):
            set_to(torch.empty(0), weight)
        kept = set_to(torch.empty(0), weight.detach())
        vector_loss(model, 0).backward()
        offloaded.step()
        assert not kept.equal(weight.detach())


@pytest.mark.parametrize("entrance", ["parameter", "module"])
def test_parameter_over_an_offloaded_one_is_refused(entrance: str, nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=WHOLE):
        weight = model.layer(0).weight
        make: Ask = nn.Parameter if entrance == "parameter" else nn.Embedding.from_pretrained
        with pytest.raises(RuntimeError, match=r"layers\.0\.weight.*detach\(\)\.clone\(\)"):
            make(weight)
        refused = list[str]()

        def inside(module: nn.Module, inputs: Any, output: Any) -> None:
            try:
                make(module.weight)
            except RuntimeError as error:
                refused.append(str(error))

        handle = model.layer(1).register_forward_hook(inside)
        vector_loss(model, 0)
        handle.remove()
        assert "layers.1.weight" in refused[0]
