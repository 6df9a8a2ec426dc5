"""What a program does to the weight of a module that is in tiles: it is done as without tiles, or
there is an error that names the weight; nothing is lost without a word.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support.models import seeded
from tests.support.training import WHOLE, same_values

pytestmark = pytest.mark.usefixtures("one_thread")

BOUND = 1 << 18


class Net(nn.Module):
    """A layer in whose place is a ``TiledLinear``, and a tied table, which is cut where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1024, 96)
        self.wide = nn.Linear(96, 1500)
        self.back = nn.Linear(1500, 96)
        self.head = nn.Linear(96, 1024, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.back(torch.relu(self.wide(self.table(tokens)))))
        return result


TOKENS = torch.arange(32) * 31 % 1024
Entrance = Callable[[Any], Any]


def _through_kept_view(weight: Any) -> None:
    row = weight[5]
    with torch.no_grad():
        row.zero_()


def _through_numpy(weight: Any) -> None:
    weight.detach().numpy()[5] = 0


def _through_numpy_of_data(weight: Any) -> None:
    weight.data.numpy()[5] = 0


def _by_operator(weight: Any) -> None:
    weight.data *= 0.5


@torch.no_grad()
def _by_out(weight: Any) -> None:
    torch.mul(weight, 0.5, out=weight)


def _without_gradients(change: Entrance) -> Entrance:
    return torch.no_grad()(change)


WRITES: dict[str, Entrance] = {
    "row": _without_gradients(lambda w: w[5].zero_()),
    "last row": _without_gradients(lambda w: w[-1].zero_()),
    "row set": _without_gradients(lambda w: w.__setitem__(5, 0.0)),
    "row of data": lambda w: w.data[5].zero_(),
    "rows of data": lambda w: w.data[-3:].mul_(2),
    "row of data set": lambda w: w.data.__setitem__(5, 0.0),
    "data": lambda w: w.data.zero_(),
    "data by operator": _by_operator,
    "data with history": lambda w: w.data.add_(torch.ones(w.shape[1], requires_grad=True) * 0.5),
    "row of detached": lambda w: w.detach()[5].zero_(),
    "detached": lambda w: w.detach().mul_(0.5),
    "kept view": _through_kept_view,
    "view": _without_gradients(lambda w: w.view(-1).mul_(0.5)),
    "transposed": _without_gradients(lambda w: w.t()[3].zero_()),
    "chunk": _without_gradients(lambda w: w.chunk(7)[2].zero_()),
    "unbind": _without_gradients(lambda w: w.unbind()[7].zero_()),
    "narrow": _without_gradients(lambda w: w.narrow(1, 0, 4).fill_(1)),
    "numpy": _through_numpy,
    "numpy of data": _through_numpy_of_data,
    "whole": _without_gradients(lambda w: w.mul_(0.5)),
    "init": nn.init.zeros_,
    "out": _by_out,
    "foreach": _without_gradients(lambda w: torch._foreach_mul_([w], 0.5)),
    "foreach of rows": _without_gradients(lambda w: torch._foreach_mul_([w[1], w[2]], 0.5)),
    "index": _without_gradients(lambda w: w.index_fill_(0, torch.tensor([5]), 0.0)),
}


def _named(owner: str) -> str:
    return rf"{owner}\.(tiles\.0\.)?weight .*`with offloaded.gathered\(\[parameter\], modify=True\)"


def _told(function: Callable[..., Any], *args: Any) -> str:
    """By what error, if any."""
    try:
        function(*args)
    except RuntimeError as error:
        return str(error)
    return ""


def _offload(model: Net, nvme: Path, bound: int | None) -> Any:
    options: Any = {"max_parameter_bytes": bound} if bound else {}
    return infinity.offload(model, nvme, host_memory=WHOLE, **options)


@pytest.mark.parametrize("bound", [BOUND, None], ids=["tiled", "untiled"])
@pytest.mark.parametrize("owner", ["wide", "table"])
def test_writes_outside_of_gathered_are_told_by_name(
    owner: str, bound: int | None, nvme: Path
) -> None:
    model = seeded(Net)
    silent = []
    with _offload(model, nvme, bound) as offloaded:
        for name, write in WRITES.items():
            told = _told(write, getattr(model, owner).weight) + _told(model, TOKENS)
            if not re.search(_named(owner), told):
                silent.append((name, told))
            with offloaded.gathered(modify=True):
                model.load_state_dict(seeded(Net).state_dict())
    assert silent == []


@pytest.mark.parametrize("bound", [BOUND, None], ids=["tiled", "untiled"])
@pytest.mark.parametrize("owner", ["wide", "table"])
def test_writes_inside_gathered_are_kept(owner: str, bound: int | None, nvme: Path) -> None:
    model, plain = seeded(Net), seeded(Net)
    with _offload(model, nvme, bound) as offloaded:
        for name, write in WRITES.items():
            with offloaded.gathered(modify=True):
                model.load_state_dict(seeded(Net).state_dict())
            with offloaded.gathered(modify=True):
                write(getattr(model, owner).weight)
            plain.load_state_dict(seeded(Net).state_dict())
            write(getattr(plain, owner).weight)
            with offloaded.gathered():
                assert same_values(dict(model.state_dict()), dict(plain.state_dict())), name


def _data_of(model: Any, _: Any) -> list[Any]:
    return [parameter.data for parameter in model.parameters()]


def _arrays_of(model: Any, _: Any) -> list[Any]:
    return [parameter.detach().numpy() for parameter in model.parameters()]


def _half(_: Any, weight: Any) -> list[Any]:
    return [weight.chunk(2)[0].data[:]]


@pytest.mark.parametrize("bound", [BOUND, None], ids=["tiled", "untiled"])
@pytest.mark.parametrize("owner", ["wide", "table"])
@pytest.mark.parametrize("views_of", [_data_of, _arrays_of, _half])
def test_views_of_tiles_that_were_taken_before_the_whole_is_used_are_those_of_the_weight(
    views_of: Callable[[Any, Any], list[Any]], owner: str, bound: int | None, nvme: Path
) -> None:
    """What was written into them was lost without a word."""
    model, plain = seeded(Net), seeded(Net)

    def change(model: Any) -> None:
        weight = getattr(model, owner).weight
        views = views_of(model, weight)
        weight.norm()
        for view in views:
            view += 1

    with _offload(model, nvme, bound) as offloaded:
        with offloaded.gathered(modify=True):
            change(model)
        change(plain)
        with offloaded.gathered():
            assert same_values(dict(model.state_dict()), dict(plain.state_dict()))


def _assigned(weight: Any, values: Any) -> Any:
    before = weight.data
    weight.data = values
    return before


def _swapped(weight: Any, values: Any) -> Any:
    weight.data, values = values, weight.data
    return values


@pytest.mark.parametrize("bound", [BOUND, None], ids=["tiled", "untiled"])
@pytest.mark.parametrize("owner", ["wide", "table"])
@pytest.mark.parametrize("swap", [_assigned, _swapped])
def test_data_that_other_data_is_assigned_over_keeps_its_values(
    swap: Callable[[Any, Any], Any], owner: str, bound: int | None, nvme: Path
) -> None:
    """As averages of weights are evaluated: what was trained was lost without a word."""
    model = seeded(Net)
    weight = getattr(model, owner).weight
    before, average = weight.detach().clone(), torch.full(weight.shape, 0.5)
    with _offload(model, nvme, bound) as offloaded:
        for is_one_block in (True, False):
            with offloaded.gathered(weight, modify=True):
                backup = swap(weight, average)
                assert torch.equal(weight.detach(), average)
                average.mul_(2)
                assert torch.equal(weight.detach(), average)
                if is_one_block:
                    weight.data = backup
            if not is_one_block:
                with offloaded.gathered(weight, modify=True):
                    weight.data = backup
            with offloaded.gathered(weight):
                assert torch.equal(weight.detach(), before)


@pytest.mark.parametrize("owner", ["wide", "table"])
def test_data_taken_outside_of_gathered_is_not_put_back_without_a_word(
    owner: str, nvme: Path
) -> None:
    model = seeded(Net)
    with _offload(model, nvme, BOUND) as offloaded:
        weight = getattr(model, owner).weight
        backup = weight.data
        with offloaded.gathered(weight, modify=True):
            weight.data = torch.zeros(weight.shape)
        refused = pytest.raises(RuntimeError, match=rf"^the data of {owner}\.weight.* as they are")
        with offloaded.gathered(weight, modify=True), refused:
            weight.data = backup


def _by_array(tile: Any) -> Any:
    return tile.detach().numpy()


@pytest.mark.parametrize("owner", ["wide", "table"])
@pytest.mark.parametrize("view_of", [lambda tile: tile.data, _by_array])
@pytest.mark.parametrize("modify", [True, False])
def test_write_into_a_tile_that_was_lent_alone_and_moved_since_is_told(
    view_of: Entrance, modify: bool, owner: str, nvme: Path
) -> None:
    """As the weight was put together: it was lost without a word."""
    model = seeded(Net)
    with _offload(model, nvme, BOUND) as offloaded:
        weight = getattr(model, owner).weight
        before, tile = weight.detach().clone(), weight.tiles[1]

        def change(*, writes: bool) -> None:
            with offloaded.gathered(tile, modify=True):
                view = view_of(tile)
                view += 1
                with offloaded.gathered(weight, modify=modify):
                    weight.norm()
                if writes:
                    view += 1

        refused = rf"^{owner}\.tiles\.1\.weight was written by a view of before"
        with pytest.raises(RuntimeError, match=refused):
            change(writes=True)
        with offloaded.gathered():
            assert torch.equal(weight.detach(), before)
        change(writes=False)
        with offloaded.gathered(weight):
            added = weight.detach() - before
            rows = slice(weight._cut_tiles[1].start, weight._cut_tiles[1].stop)
            assert torch.allclose(added[rows], torch.ones(1))


@pytest.mark.parametrize("owner", ["wide", "table"])
def test_write_behind_gathered_into_what_was_kept_of_it_is_told(owner: str, nvme: Path) -> None:
    model = seeded(Net)
    with _offload(model, nvme, BOUND) as offloaded:
        weight = getattr(model, owner).weight
        with offloaded.gathered(weight, modify=True):
            kept = weight.detach().numpy()
        kept[5] = 0
        del kept
        assert re.search(_named(owner), _told(model, TOKENS))
        with offloaded.gathered(weight.tiles[0]), offloaded.gathered(weight, modify=True):
            kept = weight.detach().numpy()
        kept[5] = 0
        del kept
        assert re.search(_named(owner), _told(model, TOKENS))


@pytest.mark.parametrize("owner", ["wide", "table"])
def test_threads_may_each_write_rows_of_their_own(owner: str, nvme: Path) -> None:
    """Each put the tiles together in memory of its own, and one of these was lost."""
    model, num_threads = seeded(Net), 4
    weight = getattr(model, owner).weight
    both = threading.Barrier(num_threads)

    @torch.no_grad()
    def fill(first: int) -> None:
        both.wait(10)
        getattr(model, owner).weight[first::num_threads].fill_(first)

    with _offload(model, nvme, BOUND) as offloaded, ThreadPoolExecutor(num_threads) as threads:
        for _ in range(10):
            with offloaded.gathered(modify=True):
                model.load_state_dict(seeded(Net).state_dict())
            with offloaded.gathered(weight, modify=True):
                list(threads.map(fill, range(num_threads)))
            with offloaded.gathered():
                found = weight.detach().clone()
            assert torch.equal(found[:, 0], torch.arange(len(found)) % num_threads)


def _assign(weight: Any) -> None:
    weight.grad = torch.ones(weight.shape)


def _assign_wrong(weight: Any) -> None:
    weight.grad = torch.ones(weight.shape[0] + 8, weight.shape[1])


def _forget(weight: Any) -> None:
    weight.grad = None


def _scale(weight: Any) -> None:
    weight.grad *= 2


GRADIENTS: dict[str, tuple[Entrance, str | None]] = {
    "zero": (lambda w: w.grad.zero_(), None),
    "mul": (lambda w: w.grad.mul_(2), None),
    "by operator": (_scale, None),
    "data": (lambda w: w.grad.data.mul_(0.5), None),
    "decay": (lambda w: w.grad.add_(w.detach(), alpha=0.1), None),
    "assigned": (_assign, None),
    "forgotten": (_forget, None),
    "clipped": (lambda w: nn.utils.clip_grad_norm_([w], 1e-3), None),
    "clipped values": (lambda w: nn.utils.clip_grad_value_([w], 1e-6), None),
    "row": (lambda w: w.grad[5].zero_(), "view of the gradient of {}.weight"),
    "assigned wrongly": (_assign_wrong, "gradient of {}.weight is of shape"),
}


@pytest.mark.parametrize("bound", [BOUND, None], ids=["tiled", "untiled"])
@pytest.mark.parametrize("owner", ["wide", "table"])
def test_gradients_are_changed_or_refused_by_name(
    owner: str, bound: int | None, nvme: Path
) -> None:
    model, plain = seeded(Net), seeded(Net)
    with _offload(model, nvme, bound) as offloaded:
        for name, (change, refusal) in GRADIENTS.items():
            for each in (model, plain):
                each.zero_grad()
                each(TOKENS).sum().backward()
            weight: Any = getattr(model, owner).weight
            if refusal is not None:
                with pytest.raises((RuntimeError, ValueError), match=refusal.format(owner)):
                    change(weight)
                continue
            change(weight)
            own = getattr(plain, owner).weight
            change(own)
            found = offloaded.gradient(weight)
            assert (found is None) == (own.grad is None), name
            if found is not None:
                assert torch.allclose(found, own.grad, rtol=1e-4, atol=1e-3), name


@pytest.mark.parametrize("owner", ["wide", "table"])
def test_hooks_on_the_weight_of_a_module_in_tiles_are_refused_by_name(
    owner: str, nvme: Path
) -> None:
    model = seeded(Net)
    with _offload(model, nvme, BOUND):
        weight = getattr(model, owner).weight
        for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
            with pytest.raises(RuntimeError, match=rf"^{owner}\.weight is in tiles"):
                register(lambda _: None)
        with pytest.raises(RuntimeError, match=rf"{owner}\.weight"):
            weight.share_memory_()


@pytest.mark.parametrize("owner", ["wide", "table"])
def test_data_of_what_is_in_tiles_has_no_history(owner: str, nvme: Path) -> None:
    model = seeded(Net)
    with _offload(model, nvme, BOUND):
        weight = getattr(model, owner).weight
        assert not weight.data.requires_grad
        (weight - weight.data).sum().backward()
        assert torch.equal(weight.grad.clone(), torch.ones(weight.shape))
        assert not nn.functional.linear(torch.ones(1, 96), weight.data).requires_grad
