"""What a failed load was given goes with its last reference: models are large."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import checkpoint
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Of two steps, of which the second is damaged where only reading it all tells."""
    manager = checkpoint.Manager(tmp_path / "run", keep=2)
    for step in (1, 2):
        manager.save(step, {"w": torch.full((4,), float(step))})
    (file,) = manager.path(2).rglob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(4096)
        opened.write(b"x")
    return tmp_path / "run"


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Refusing:
    """A sink that raises."""

    dtype = torch.float32
    shape = (4,)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def write(self, start: int, data: memoryview) -> None:
        try:
            raise KeyError
        except KeyError:
            raise ValueError("refused")  # noqa: B904  what it came from is to stay


WAYS: dict[str, Callable[[Path, torch.Tensor], object]] = {
    "damage": lambda root, into: checkpoint.load(root / "step-2", into={"w": into}),
    "nothing there": lambda root, into: checkpoint.load(root / "step-3", into={"w": into}),
    "another name": lambda root, into: checkpoint.load(root / "step-1", into={"v": into}),
    "a sink": lambda root, into: checkpoint.load(root / "step-1", into={"w": Refusing(into)}),
    "by number": lambda root, into: checkpoint.Manager(root).load(2, into={"w": into}),
    "no such step": lambda root, into: checkpoint.Manager(root).load(3, into={"w": into}),
    "another name, latest": lambda root, into: checkpoint.Manager(root).load(into={"v": into}),
    "a sink, latest": lambda root, into: checkpoint.Manager(root).load(into={"w": Refusing(into)}),
}


def _failed(load: Callable[[torch.Tensor], object]) -> weakref.ref[torch.Tensor]:
    into = torch.zeros(4)
    with suppress(ValueError, OSError):
        load(into)
        pytest.fail("it has not failed")
    return weakref.ref(into)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("way", WAYS)
def test_what_a_failed_load_was_given_goes_with_its_last_reference(root: Path, way: str) -> None:
    assert _failed(lambda into: WAYS[way](root, into))() is None


def test_an_error_of_a_sink_is_shown_without_what_brought_it(root: Path) -> None:
    with pytest.raises(ValueError, match="refused") as caught:
        checkpoint.load(root / "step-1", into={"w": Refusing(torch.zeros(4))})
    assert caught.value.__cause__ is None
    assert isinstance(caught.value.__context__, KeyError)
