"""Entering and leaving the block: what is left of it, in whatever order and by whatever way."""

import gc
import io
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from tqdm import tqdm

import infinity
from infinity.values.initial import materialize
from tests.support.models import Gpt, Stack, seeded, token_loss, vector_loss
from tests.support.training import WHOLE, least_budget, same_bits, same_values, values_of


def _module_face(module: nn.Module) -> dict[str, Any]:
    """All that a module consists of but for values."""
    face: dict[str, Any] = {}
    for key, value in module.__dict__.items():
        is_dict = isinstance(value, dict)
        face[key] = (type(value), id(value) if is_dict else None, len(value) if is_dict else value)
    return face


def _parameter_face(parameter: nn.Parameter) -> dict[str, Any]:
    return {
        "id": id(parameter),
        "class": type(parameter),
        "attributes": dict(parameter.__dict__),
        "dtype": parameter.dtype,
        "device": parameter.device,
        "requires_grad": parameter.requires_grad,
        "stride": parameter.stride(),
        "hooks": len(parameter._post_accumulate_grad_hooks or ()),
    }


def _faces(model: nn.Module) -> list[dict[str, Any]]:
    return [
        *(_module_face(module) for module in model.modules()),
        *(_parameter_face(parameter) for parameter in model.parameters()),
    ]


def _default_saved_tensors_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _threads() -> set[str]:
    """Names of threads but those that progress bars leave."""
    return {thread.name for thread in threading.enumerate()} - {"tqdm_monitor"}


@pytest.fixture(params=["whole", "least"])
def stack_budget(request: pytest.FixtureRequest, nvme: Path) -> int:
    """Bytes of host memory for ``Stack()``."""
    return WHOLE if request.param == "whole" else least_budget(Stack, nvme)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leaving_the_block_restores_everything_but_values(
    dtype: torch.dtype, stack_budget: int, nvme: Path
) -> None:
    model = Stack().to(dtype)
    model.layer(3).requires_grad_(False)
    before, faces, threads = values_of(model), _faces(model), _threads()
    with infinity.offload(model, nvme, host_memory=stack_budget) as offloaded:
        vector_loss(_in_dtype(model, dtype), 0).backward()
        offloaded.step()
    assert _faces(model) == faces
    assert all(parameter.grad is None for parameter in model.parameters())
    assert _default_saved_tensors_hooks() is None
    assert _threads() == threads
    after = values_of(model)
    assert same_bits(before["layers.3.weight"], after["layers.3.weight"])
    assert not same_bits(before["layers.0.weight"], after["layers.0.weight"])
    vector_loss(_in_dtype(model, dtype), 0).backward()
    assert all(parameter.grad is not None for parameter in model.norm.parameters())


def _in_dtype(model: nn.Module, dtype: torch.dtype) -> Any:
    """``model`` on inputs of that dtype."""
    return lambda inputs: model(inputs.to(dtype))


def test_leaving_without_a_step_gives_back_the_same_bits(nvme: Path) -> None:
    for dtype, compute in (
        (torch.float32, None),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float32),
        (torch.float16, None),
        (torch.float64, torch.float32),
    ):
        model = seeded(Stack).to(dtype)
        before = values_of(model)
        least = least_budget(partial(_stack_of, dtype), nvme, compute_dtype=compute)
        with infinity.offload(model, nvme, host_memory=least, compute_dtype=compute):
            assert all(parameter.dtype == (compute or dtype) for parameter in model.parameters())
        for name, value in values_of(model).items():
            assert same_bits(value, before[name]), (dtype, compute, name)


def _stack_of(dtype: torch.dtype) -> Stack:
    return Stack().to(dtype)


def test_bfloat16_weights_after_the_block_are_those_computed_with(nvme: Path) -> None:
    """A master between two bfloat16 numbers has a nearest one by our rule and one by torch's."""
    model = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    halfway = partial(torch.optim.SGD, lr=2.0**-8)
    with infinity.offload(model, nvme, optimizer=halfway) as offloaded:
        (-model.weight.sum()).backward()
        offloaded.step()
        with offloaded.gathered():
            inside = model.weight.detach().clone()
    assert same_bits(inside, model.weight)


def test_ties_and_shared_modules_survive_the_block(nvme: Path) -> None:
    model = Gpt(tied=True)
    with infinity.offload(model, nvme, host_memory=least_budget(Gpt, nvme)) as offloaded:
        assert model.head.weight is model.embedding.weight
        token_loss(model, 0).backward()
        offloaded.step()
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())


class _Interruption(BaseException):
    """As ``KeyboardInterrupt``: hooks that run after an ``Exception`` do not run after this."""


@pytest.mark.parametrize("error", [ValueError, _Interruption])
@pytest.mark.parametrize("place", ["forward", "backward", "block", "after a step"])
def test_an_exception_inside_leaves_a_whole_model(
    error: type[BaseException], place: str, stack_budget: int, nvme: Path
) -> None:
    model = seeded(Stack)
    faces, before = _faces(model), values_of(model)

    with pytest.raises(error, match="on purpose"):
        _fail_inside(model, nvme, stack_budget, error, place)
    assert _faces(model) == faces
    assert _default_saved_tensors_hooks() is None
    changed = {
        name for name, value in values_of(model).items() if not same_bits(value, before[name])
    }
    assert changed == (set(before) if place == "after a step" else set())


def _fail_inside(
    model: Stack, nvme: Path, host_memory: int, error: type[BaseException], place: str
) -> None:
    def fail(*_: Any) -> None:
        raise error("on purpose")

    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        if place == "forward":
            with model.layer(5).register_forward_hook(fail):
                model(torch.ones(2, 256))
        elif place == "backward":
            inputs = torch.ones(2, 256, requires_grad=True)
            inputs.register_hook(fail)
            model(inputs).sum().backward()
        elif place == "after a step":
            vector_loss(model, 0).backward()
            offloaded.step()
        fail()


def test_two_models_share_a_directory_and_a_graph(nvme: Path) -> None:
    """Two models that train together give what they give with everything in memory."""
    results = []
    for host_memory in (WHOLE, least_budget(Stack, nvme)):
        first, second = seeded(Stack, 1), seeded(Stack, 2)
        with (
            infinity.offload(first, nvme, host_memory=host_memory) as one,
            infinity.offload(second, nvme, host_memory=host_memory) as other,
        ):
            for step in range(3):
                vector_loss(nn.Sequential(first, second), step).backward()
                one.step()
                other.step()
        results.append(values_of(first) | {f"second {k}": v for k, v in values_of(second).items()})
    assert same_values(results[0], results[1])


def test_blocks_that_do_not_nest_keep_training_exactly(nvme: Path) -> None:
    """The block entered first is left first; hooks of autograd are a stack that knows no names."""
    least = least_budget(Stack, nvme)
    expected = seeded(Stack, 2)
    with infinity.offload(expected, nvme, host_memory=WHOLE) as offloaded:
        _train_stack(expected, offloaded, range(4))
    first, second = ExitStack(), ExitStack()
    model = seeded(Stack, 2)
    first.enter_context(infinity.offload(seeded(Stack, 1), nvme, host_memory=least))
    offloaded = second.enter_context(infinity.offload(model, nvme, host_memory=least))
    _train_stack(model, offloaded, range(2))
    first.close()
    _train_stack(model, offloaded, range(2, 4))
    second.close()
    assert _default_saved_tensors_hooks() is None
    found = values_of(model)
    assert all(same_bits(value, found[name]) for name, value in values_of(expected).items())


def _train_stack(model: nn.Module, offloaded: infinity.OffloadedModel, steps: range) -> None:
    for step in steps:
        vector_loss(model, step).backward()
        offloaded.step()


def test_a_model_cannot_be_offloaded_twice(nvme: Path) -> None:
    model = Stack()
    with infinity.offload(model, nvme):
        with (
            pytest.raises(ValueError, match=r"layers\.0\.weight is offloaded already"),
            infinity.offload(model, nvme),
        ):
            pass
        vector_loss(model, 0).backward()
    with infinity.offload(model, nvme) as offloaded:
        _train_stack(model, offloaded, range(1))


def test_a_generator_may_hold_the_block(nvme: Path) -> None:
    def training(model: nn.Module, host_memory: int) -> Iterator[float]:
        with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
            for step in range(100):
                loss = vector_loss(model, step)
                loss.backward()
                offloaded.step()
                yield loss.item()

    model = seeded(Stack)
    faces = _faces(model)
    run = training(model, least_budget(Stack, nvme))
    losses = [next(run) for _ in range(3)]
    assert len(set(losses)) == 3
    run.close()  # type: ignore[attr-defined]
    assert _faces(model) == faces


def test_nothing_of_the_block_is_kept_alive(nvme: Path) -> None:
    model = Stack()
    with infinity.offload(model, nvme, host_memory=least_budget(Stack, nvme)) as offloaded:
        _train_stack(model, offloaded, range(2))
        state = offloaded._training.state
        kept = [weakref.ref(thing) for thing in (offloaded, state, *state.slabs.values())]
    del offloaded, state
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


def test_weights_that_the_program_kept_outlive_the_block(nvme: Path) -> None:
    """They are views of memory of the library, which must not be unmapped under them."""
    model = seeded(Stack)
    before = values_of(model)
    with infinity.offload(model, nvme, host_memory=least_budget(Stack, nvme)):
        kept = {name: parameter.detach() for name, parameter in [*model.named_parameters()][:2]}
    gc.collect()
    assert all(same_bits(value, before[name]) for name, value in kept.items())


USES: dict[str, Callable[[infinity.OffloadedModel, nn.Module], Any]] = {
    "step": lambda offloaded, model: offloaded.step(),
    "optimizer.step": lambda offloaded, model: offloaded.optimizer.step(),
    "backward": lambda offloaded, model: offloaded.backward(torch.ones((), requires_grad=True)),
    "clip_grad_norm_": lambda offloaded, model: offloaded.clip_grad_norm_(1.0),
    "grad_norm": lambda offloaded, model: offloaded.grad_norm,
    "loss_scale": lambda offloaded, model: offloaded.loss_scale,
    "gradient": lambda offloaded, model: offloaded.gradient(next(model.parameters())),
    "gathered": lambda offloaded, model: offloaded.gathered().__enter__(),
    "flush": lambda offloaded, model: offloaded.flush(),
    "report": lambda offloaded, model: offloaded.report(),
    "trace": lambda offloaded, model: offloaded.trace("trace.json"),
    "save": lambda offloaded, model: offloaded.save("saved"),
    "load": lambda offloaded, model: offloaded.load("saved"),
    "export": lambda offloaded, model: offloaded.export("exported"),
}


def test_every_use_after_the_block_says_so(
    nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Stack()
    with infinity.offload(model, nvme) as offloaded:
        _train_stack(model, offloaded, range(1))
    monkeypatch.chdir(tmp_path)
    for name, use in USES.items():
        with pytest.raises(RuntimeError, match="inside the `with` block"):
            use(offloaded, model)
        assert name
    assert list(tmp_path.iterdir()) == [nvme]


def test_backward_after_the_block_says_so(stack_budget: int, nvme: Path) -> None:
    model = Stack()
    with infinity.offload(model, nvme, host_memory=stack_budget):
        loss = vector_loss(model, 0)
    with pytest.raises(RuntimeError, match="call backward inside the `with` block"):
        loss.backward()


@pytest.mark.proof
def test_training_goes_on_after_interruptions(nvme: Path) -> None:
    """An interrupted forward must leave no weights pinned: the arena has room for two layers."""
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=least_budget(Stack, nvme)) as offloaded:
        _train_stack(model, offloaded, range(2))
        for index in range(len(model.layers)):
            with (
                model.layer(index).register_forward_hook(_interrupt),
                pytest.raises(_Interruption),
            ):
                model(torch.ones(2, 256))
            offloaded.optimizer.zero_grad()
            _train_stack(model, offloaded, range(2 + index, 3 + index))
    expected = seeded(Stack)
    with infinity.offload(expected, nvme, host_memory=WHOLE) as offloaded:
        _train_stack(expected, offloaded, range(2 + len(expected.layers)))
    found = values_of(model)
    assert all(same_bits(value, found[name]) for name, value in values_of(expected).items())


def _interrupt(*_: Any) -> None:
    raise _Interruption("on purpose")


def test_block_begins_while_a_lock_of_progress_bars_is_not_given_back(nvme: Path) -> None:
    begun = threading.Event()

    def begin() -> None:
        with infinity.offload(nn.Linear(4, 4), nvme):
            begun.set()

    thread = threading.Thread(target=begin, daemon=True)
    with tqdm.get_lock():  # as an interrupt within it leaves it
        thread.start()
        has_begun = begun.wait(10)
    thread.join()
    assert has_begun


def test_bar_is_shown_on_a_terminal_where_values_take_long(
    nvme: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(materialize, "_DELAY_SECONDS", -1.0)
    for is_terminal in (False, True):
        monkeypatch.setattr(materialize, "_is_terminal", lambda _, shown=is_terminal: shown)
        with infinity.offload(nn.Linear(4, 4), nvme):
            pass
        assert ("offloading" in capsys.readouterr().err) == is_terminal


class _Log:
    """As programs put in the place of ``sys.stderr`` to have a copy of it."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("what", ["closed", "a log", "none"])
def test_block_begins_without_a_stream_for_its_bar(
    what: str, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    streams = {"closed": closed, "a log": _Log(), "none": None}
    monkeypatch.setattr(materialize, "_DELAY_SECONDS", -1.0)
    monkeypatch.setattr(sys, "stderr", streams[what])
    with infinity.offload(nn.Linear(4, 4), nvme) as offloaded:
        assert offloaded.report()
