"""Saved tensors that a program, or a backward function of Python, does more with than read them."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import cpp_extension

import infinity
from infinity.autograd import returned
from tests.support.activations import KIB, chain

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = ("keep", "host", "nvme")
each_mode = pytest.mark.parametrize("mode", MODES)


class _Returning(torch.autograd.Function):
    """The gradient of its first argument is its second."""

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return w.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return x, None


class _Subclass(torch.Tensor):
    pass


@each_mode
@pytest.mark.parametrize("way", ["leaf", "view", "two"])
@pytest.mark.parametrize(
    "kind", ["batch", "leaf", "subclass", "result", "weights", "turned", "sparse"]
)
def test_gradient_that_a_function_saved_is_no_memory_of_others(
    kind: str, way: str, mode: str, nvme: Path
) -> None:
    model = nn.Linear(512, 512)
    before = model.weight.detach().clone()
    with infinity.offload(model, nvme, host_memory="64MiB", activations=mode) as offloaded:
        batch = torch.randn(512, 512)
        result = model(batch)
        given: dict[str, torch.Tensor] = {
            "batch": batch,
            "leaf": torch.randn(512, 512, requires_grad=True),
            "subclass": torch.randn(512, 512).as_subclass(_Subclass).requires_grad_(),
            "result": result,
            "weights": model.weight,
            "turned": result.t(),
            "sparse": torch.eye(512).to_sparse().requires_grad_(),
        }
        saved = given[kind]
        expected = saved.detach().to_dense().clone()
        w = torch.zeros(512, 512, requires_grad=True)
        arrives = w.view(512, 512) if way == "view" and kind != "sparse" else w
        loss = _Returning.apply(arrives, saved) + result.sin().sum()
        times = 1
        if way == "two":
            loss, times = loss + _Returning.apply(arrives, saved), 2
        for _ in range(2):
            loss.backward(retain_graph=True)
            assert w.grad is not None
            assert torch.equal(w.grad.to_dense(), times * expected)
            if kind != "sparse":
                w.grad.mul_(3)
            w.grad = None
        if kind != "weights":
            assert torch.equal(saved.detach().to_dense(), expected)
        with offloaded.gathered([model.weight]):
            assert torch.equal(model.weight, before)
        offloaded.optimizer.zero_grad()


def test_nodes_that_never_run_are_not_hooked_again_and_again(nvme: Path) -> None:
    model = nn.Linear(4, 4)
    with infinity.offload(model, nvme, host_memory="64MiB"):
        w, other = (torch.zeros(4, requires_grad=True) for _ in range(2))
        (node, _), _ = _Returning.apply(w, other * 2).grad_fn.next_functions
        waiting = set()
        for _ in range(3):
            torch.autograd.grad(_Returning.apply(w, other * 2), w)
            waiting.add(node.metadata["infinity.returned"])
            assert not any(one() for one in returned._passes.values())
        assert len(waiting) == 1
        assert len(returned._passes) == 1


class _Working(torch.autograd.Function):
    """Does something else as its gradient comes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, work: Callable[[], None]) -> torch.Tensor:
        ctx.work = work
        return x.sum()

    @staticmethod
    @torch.enable_grad()
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.work()
        return torch.ones(1), None


class _Waiting(torch.autograd.Function):
    """Has no gradient, and was there before the others: it is the last to say so."""

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
        return w.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


@each_mode
@pytest.mark.parametrize("kind", ["batch", "result"])
@pytest.mark.parametrize("who", ["function", "thread", "one that fails"])
def test_gradient_that_a_function_saved_is_no_memory_of_others_behind_another_pass(
    who: str, kind: str, mode: str, nvme: Path
) -> None:
    model = nn.Linear(512, 512)
    w, z = torch.zeros(512, 512, requires_grad=True), torch.ones(1, requires_grad=True)
    passes = []

    def one_pass() -> None:
        (_Returning.apply(w, torch.ones(512, 512)) + (w * 3).sum()).backward()
        w.grad = None
        passes.append(who)

    def work() -> None:
        if who == "one that fails":
            failing = _Returning.apply(w, torch.ones(512, 512)) + _Working.apply(w, lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                failing.backward()
        if who != "thread":
            one_pass()
            return
        (thread := threading.Thread(target=one_pass)).start()
        thread.join()

    with infinity.offload(model, nvme, host_memory="64MiB", activations=mode) as offloaded:
        batch = torch.randn(512, 512)
        saved = {"batch": batch, "result": model(batch)}[kind]
        expected = saved.detach().clone()
        loss = _Waiting.apply(w) + _Working.apply(z, work) + _Returning.apply(w, saved)
        for number in range(2):
            loss.backward(retain_graph=True)
            assert len(passes) == number + 1
            assert w.grad is not None
            assert torch.equal(w.grad, expected)
            w.grad.mul_(3)
            w.grad = None
        assert torch.equal(saved, expected)
        offloaded.optimizer.zero_grad()


class _Expanding(_Returning):
    """The gradient of its first argument is its second, many times."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return x.expand(64, -1), None


@each_mode
def test_expanded_view_of_what_was_saved_is_not_made_whole(mode: str, nvme: Path) -> None:
    model = nn.Linear(4, 4)
    made: list[int] = []
    with infinity.offload(model, nvme, host_memory="64MiB", activations=mode):
        w, x = torch.zeros(1, 128 * KIB, requires_grad=True), torch.ones(128 * KIB)
        wide = w.expand(64, -1)
        node: Any = wide.grad_fn
        node.register_prehook(
            lambda gradients: made.append(gradients[0].untyped_storage().nbytes())
        )
        _Expanding.apply(wide, x).backward()
    assert made == [512 * KIB]
    assert w.grad is not None
    assert (w.grad == 64).all()


class _Updating(torch.autograd.Function):
    """Its backward adds one to what it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, statistic: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(statistic)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (statistic,) = ctx.saved_tensors
        statistic.data.add_(1)
        return gradient * 2, None


@each_mode
@pytest.mark.parametrize("leaf", [False, True])
def test_what_a_backward_function_updates_is_updated(leaf: bool, mode: str, nvme: Path) -> None:
    model = nn.Linear(512, 512)
    statistic = torch.zeros(512, 512, requires_grad=leaf)
    # Its share for saved tensors is less than what is saved.
    with infinity.offload(model, nvme, host_memory="34MiB", activations=mode):
        x = torch.randn(512, 512)
        for step in range(3):
            y = _Updating.apply(model(x), statistic)
            chain(y, 12).sum().backward()
            assert (statistic == step + 1).all()


class _Consuming(torch.autograd.Function):
    """Its backward takes what it saved for its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        result: torch.Tensor = x.mul_(2).mul_(gradient)
        return result


@pytest.mark.parametrize("host_memory", ["1GiB", "34MiB"])
@each_mode
@pytest.mark.parametrize("what", ["another function", "a second pass", "a view"])
def test_saved_tensor_that_a_backward_function_changed_is_refused_to_others(
    what: str, mode: str, host_memory: str, nvme: Path
) -> None:
    model = nn.Linear(512, 512)
    with infinity.offload(model, nvme, host_memory=host_memory, activations=mode):
        y = model(torch.randn(512, 512)).mul(2)
        kept = (y if what == "another function" else y[:300]).sin()
        # Backward runs in the opposite order: the later function is the first.
        changes = _Consuming.apply(y).sum()
        others = chain(torch.randn(512, 512, requires_grad=True), 8).sum()
        loss = changes + others if what == "a second pass" else kept.sum() + changes + others
        del y, kept
        if what == "a second pass":
            loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace operation)"):
            loss.backward()


def test_saved_tensor_that_is_changed_where_it_is_looked_at_is_refused(nvme: Path) -> None:
    model = nn.Linear(512, 512)
    with infinity.offload(model, nvme, host_memory="64MiB", activations="nvme"):
        y = model(torch.randn(512, 512)).exp()
        y.grad_fn._saved_result.mul_(2)
        with pytest.raises(RuntimeError, match="modified in place"):
            y.sum().backward()


@each_mode
def test_backward_in_inference_mode_is_that_of_plain_torch(mode: str, nvme: Path) -> None:
    x = torch.randn(512, 512, requires_grad=True)
    model = nn.Linear(512, 512)
    with torch.inference_mode(False):
        (expected,) = torch.autograd.grad(chain(model(x), 12).sum(), x)
    with infinity.offload(model, nvme, host_memory="34MiB", activations=mode):
        loss = chain(model(x), 12).sum()
        with torch.inference_mode():
            (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected)


_EXTENSION = """
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
using namespace torch::autograd;
struct Returning : public Function<Returning> {
  static at::Tensor forward(AutogradContext* context, at::Tensor w, at::Tensor x) {
    context->save_for_backward({x});
    return w.sum();
  }
  static variable_list backward(AutogradContext* context, variable_list) {
    return {context->get_saved_variables()[0], at::Tensor()};
  }
};
at::Tensor returning(at::Tensor w, at::Tensor x) { return Returning::apply(w, x); }
TORCH_LIBRARY(tests_returning, library) { library.def("returning", &returning); }
"""


@pytest.mark.proof
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_gradient_that_a_function_of_cpp_saved_is_no_memory_of_others(
    tmp_path: Path, nvme: Path
) -> None:
    source, library = tmp_path / "returning.cpp", tmp_path / "returning.so"
    source.write_text(_EXTENSION)
    words: list[str | Path] = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", "-o", library]
    words += [source, *(f"-I{path}" for path in cpp_extension.include_paths())]
    words += [f"-L{path}" for path in cpp_extension.library_paths()]
    subprocess.run([*words, "-ltorch", "-ltorch_cpu", "-lc10"], check=True)
    torch.ops.load_library(library)
    model = nn.Linear(512, 512)
    before = model.weight.detach().clone()
    for mode in MODES:
        with infinity.offload(model, nvme, host_memory="64MiB", activations=mode) as offloaded:
            w, batch = torch.zeros(512, 512, requires_grad=True), torch.ones(512, 512)
            for saved in (batch, model.weight):
                torch.ops.tests_returning.returning(w, saved).backward()
                assert w.grad is not None
                w.grad.mul_(3)
                w.grad = None
            assert (batch == 1).all()
            with offloaded.gathered():
                assert torch.equal(model.weight, before)
            offloaded.optimizer.zero_grad()
