"""What becomes of an operator on a parameter whose values could not be read back as a block ended:
it names the parameter, whichever way torch is called.
"""

import copy
import gc
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import infinity
from infinity import restoring
from infinity.parameters.offloaded import placeholders
from tests.infinity.test_entrances import ENTRANCES
from tests.support.damage import restore_error
from tests.support.training import same_bits

BIG = 256  # 256 x 256 elements are on NVMe
NAMED = r"0\.weight has no values.* retry\(\)"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "_PAUSES_SECONDS", (0.0,))


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(BIG, BIG, bias=False))


def _weight(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


def _with_autocast(w: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(torch.ones(2, BIG), w)


def _without_autograd(w: Any) -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2, BIG) @ w


def _compiled(w: Any) -> Any:
    try:
        return torch.compile(lambda x: F.linear(x, w), backend="aot_eager")(torch.ones(2, BIG))
    finally:
        torch._dynamo.reset()


WAYS: dict[str, Callable[[Any], Any]] = {
    "linear": lambda w: F.linear(torch.ones(2, BIG), w),
    "matmul": lambda w: torch.ones(2, BIG) @ w,
    "addmm": lambda w: torch.addmm(w, torch.ones(BIG, BIG), torch.ones(BIG, BIG)),
    "bias": lambda w: F.linear(torch.ones(2, BIG), torch.ones(BIG, BIG), w[0]),
    "embedding": lambda w: F.embedding(torch.tensor([1]), w),
    "autocast": _with_autocast,
    "inference mode": _without_autograd,
    "compiled": _compiled,
    "out=": lambda w: torch.mul(torch.ones(BIG, BIG), 2, out=w),
    "filled": nn.init.ones_,
    "cpu": lambda w: w.cpu(),
    "float": lambda w: w.to(torch.float64),
    "detach": lambda w: w.detach(),
    "view": lambda w: w.view(-1),
}


WITHOUT_THE_NAME = r"\bmeta\b|incompatible tensor type|only available on CPU"
"""What torch itself says of tensors that are not on the CPU; nothing is computed then, either."""
TO_OTHER_PROCESSES = "multiprocessing"
"""Here a parameter arrives as any on meta does, and modules refuse their calls."""


@pytest.mark.filterwarnings("ignore")  # torch would have some of these done in other ways
def test_every_entrance_names_a_lost_parameter_or_gives_it_itself(tmp_path: Path) -> None:
    model, wrong = _model(), list[str]()
    error = restore_error(model, tmp_path)
    weight = _weight(model)
    for way, ask in {**ENTRANCES, **WAYS}.items():
        try:
            given = ask(weight)
        except Exception as refusal:
            if not re.search(rf"{NAMED}|{WITHOUT_THE_NAME}", str(refusal)):
                wrong.append(f"{way}: {type(refusal).__name__} {refusal}")
        else:
            if given is not weight and way != TO_OTHER_PROCESSES:
                wrong.append(f"{way} gave {type(given)}")
    assert not wrong, "\n".join(wrong)
    for computed in ("linear", "matmul", "autocast", "inference mode", "torch.save", "detach"):
        with pytest.raises(RuntimeError, match=NAMED):
            {**ENTRANCES, **WAYS}[computed](weight)
    error.retry()
    assert same_bits(_weight(model), _weight(_model()))
    assert _weight(copy.deepcopy(model)).equal(_weight(model))
    torch.save(model, io.BytesIO())


def test_lost_parameter_tells_what_is_not_its_values(tmp_path: Path) -> None:
    model = _model()
    error = restore_error(model, tmp_path)
    weight = _weight(model)
    assert type(weight) is nn.Parameter
    assert (weight.shape, weight.dtype, weight.stride()) == ((BIG, BIG), torch.float32, (BIG, 1))
    assert (weight.is_meta, weight.is_leaf, weight.grad) == (True, True, None)
    assert "device='meta'" in repr(weight)
    assert torch.empty_like(weight, device="cpu").shape == (BIG, BIG)
    weight.requires_grad_(False).requires_grad_(True)
    torch.optim.AdamW(model.parameters()).step()
    error.retry()


@pytest.mark.parametrize(
    "write",
    [
        lambda model, path: model.state_dict(),
        lambda model, path: torch.save(model, path),
        lambda model, path: torch.save(model.state_dict(keep_vars=True), path),
        lambda model, path: save_file(dict(model.named_parameters()), path),
        lambda model, path: copy.deepcopy(model),
        lambda model, path: model.half(),
        lambda model, path: model.load_state_dict(_model().state_dict()),
    ],
)
@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta")
def test_model_with_lost_values_is_not_written_nor_converted(
    write: Callable[[nn.Module, Path], Any], tmp_path: Path
) -> None:
    model = _model()
    error = restore_error(model, tmp_path)
    with pytest.raises(Exception, match=r"0\.weight has no values"):
        write(model, tmp_path / "written")
    error.retry()
    assert same_bits(_weight(model), _weight(_model()))


def _emptied(model: nn.Sequential, nvme: Path) -> None:
    model.to_empty(device="cpu")
    nn.init.constant_(_weight(model), 1.0)


def _emptied_by_swapping(model: nn.Sequential, nvme: Path) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        _emptied(model, nvme)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _assigned(model: nn.Sequential, nvme: Path) -> None:
    model.load_state_dict({"0.weight": torch.ones(BIG, BIG)}, assign=True)


def _replaced(model: nn.Sequential, nvme: Path) -> None:
    model[0].weight = nn.Parameter(torch.ones(BIG, BIG))


@pytest.mark.parametrize("give", [_emptied, _emptied_by_swapping, _assigned, _replaced])
def test_lost_parameter_that_was_given_values_is_as_any_other(
    give: Callable[[nn.Sequential, Path], None], tmp_path: Path
) -> None:
    model = _model()
    error = restore_error(model, tmp_path)
    give(model, tmp_path)
    weight = _weight(model)
    inputs = torch.ones(2, BIG)
    assert same_bits(F.linear(inputs, weight), torch.full((2, BIG), float(BIG)))
    assert same_bits(model(inputs), F.linear(inputs, weight))
    torch.save(model, io.BytesIO())
    assert _weight(copy.deepcopy(model)).equal(weight)
    error.retry()
    assert same_bits(_weight(model), _weight(_model()))


@pytest.mark.parametrize("optimizer", [None, infinity.AdamW()], ids=["inference", "training"])
@pytest.mark.parametrize("way", ["weights", "load"])
def test_parameter_without_values_comes_back_from_a_block_that_gives_it_some(
    way: str, optimizer: infinity.AdamW | None, tmp_path: Path
) -> None:
    model, inputs = _model(), torch.ones(2, BIG)
    expected = model(inputs).detach()
    weights, saved = tmp_path / "weights.safetensors", tmp_path / "saved"
    save_file(_model().state_dict(), weights)
    with infinity.offload(_model(), tmp_path, optimizer=optimizer) as offloaded:
        offloaded.save(saved)
    restore_error(model, tmp_path)
    gc.collect()
    given = weights if way == "weights" else None
    with infinity.offload(model, tmp_path, optimizer=optimizer, weights=given) as offloaded:
        if way == "load":
            offloaded.load(saved)
        assert same_bits(model(inputs), expected)
    assert same_bits(_weight(model), _weight(_model()))
    assert same_bits(model(inputs), expected)
    assert type(_weight(copy.deepcopy(model))) is nn.Parameter


def _use_first(model: nn.Module, offloaded: infinity.OffloadedModel, folder: Path) -> None:
    model(torch.ones(2, BIG))


def _gather_first(model: nn.Module, offloaded: infinity.OffloadedModel, folder: Path) -> None:
    with offloaded.gathered(modify=True):
        pass


def _save_first(model: nn.Module, offloaded: infinity.OffloadedModel, folder: Path) -> None:
    offloaded.save(folder / "saved")


def _only_leave(model: nn.Module, offloaded: infinity.OffloadedModel, folder: Path) -> None:
    pass


@pytest.mark.parametrize("does", [_use_first, _gather_first, _save_first, _only_leave])
def test_block_does_nothing_without_values_in_the_place_of_lost_ones(
    does: Callable[[nn.Module, infinity.OffloadedModel, Path], None], tmp_path: Path
) -> None:
    model = _model()
    restore_error(model, tmp_path)
    gc.collect()
    with (
        pytest.raises(infinity.MixedStateError, match=r"lost the values of 0\.weight") as told,
        infinity.offload(model, tmp_path) as offloaded,
    ):
        does(model, offloaded, tmp_path)
    assert told.value.parameters == ["0.weight"]
    with pytest.raises(RuntimeError, match=NAMED):
        F.linear(torch.ones(2, BIG), _weight(model))


class _Scaled(nn.Module):
    """As layers written by hand are: nothing but its constructor sets the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((BIG,), 2.0))
        self.linear = nn.Linear(BIG, 2 * BIG)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(inputs * self.scale)
        return outputs


@pytest.mark.parametrize("bound", [None, 4 * BIG * BIG], ids=["whole", "in tiles"])
def test_lost_parameters_that_nothing_initialises_are_loaded(
    bound: int | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, inputs = _Scaled(), torch.ones(2, BIG)
    came = copy.deepcopy(model.state_dict())
    expected = model(inputs).detach()
    with infinity.offload(model, tmp_path, max_parameter_bytes=bound) as offloaded:
        offloaded.save(tmp_path / "saved")
    restore_error(model, tmp_path, max_parameter_bytes=bound)
    gc.collect()
    with infinity.offload(model, tmp_path, max_parameter_bytes=bound) as offloaded:
        with pytest.raises(infinity.MixedStateError, match="scale"):
            model(inputs)
        offloaded.load(tmp_path / "saved")
        assert same_bits(model(inputs), expected)
    assert all(same_bits(value, came[name]) for name, value in model.state_dict().items())
    assert same_bits(model(inputs), expected)


def test_lost_parameter_of_a_block_that_could_not_begin_is_as_it_was(tmp_path: Path) -> None:
    model = _model()
    restore_error(model, tmp_path)
    gc.collect()
    with (
        pytest.raises(ValueError, match="other"),
        infinity.offload(model, tmp_path, weights=_file_of(tmp_path, {"other": torch.ones(2)})),
    ):
        pass
    with pytest.raises(RuntimeError, match=NAMED):
        F.linear(torch.ones(2, BIG), _weight(model))


def _file_of(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "other.safetensors")
    return folder / "other.safetensors"


def test_what_is_said_of_lost_values_goes_with_them(tmp_path: Path) -> None:
    model = _model()
    restore_error(model, tmp_path)
    key = _weight(model).untyped_storage()._cdata
    gc.collect()
    assert "0.weight" in placeholders._losses[key].refusal
    del model
    gc.collect()
    assert key not in placeholders._losses
