"""Arguments of another type are refused by name, before anything is touched."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aio import Engine, MemoryBackend, RangeAllocator, Request, Slab, SlabFullError, sync_directory

ODD: list[Any] = ["odd", 1.5, [1], object(), b"odd"]
MAKERS: list[tuple[Callable[..., object], list[str]]] = [
    (Engine, ["queue_depth", "block_bytes", "lanes", "max_pending_bytes"]),
    (MemoryBackend, ["seed", "errno", "gate", "refuse_direct"]),
    (lambda **odd: Slab(**{"nbytes": 4096, **odd}), ["nbytes", "lock", "huge_pages", "inherited"]),
    (lambda **odd: RangeAllocator(**{"nbytes": 4096, **odd}), ["nbytes", "alignment"]),
]


@pytest.mark.parametrize("odd", ODD, ids=lambda value: type(value).__name__)
def test_argument_of_another_type_is_refused_by_name(odd: Any, tmp_path: Path) -> None:
    for make, names in MAKERS:
        for name in names:
            with pytest.raises(TypeError, match=f"{name}="):
                make(**{name: odd})
    if not isinstance(odd, float):
        with pytest.raises(TypeError, match="short_submit="):
            MemoryBackend(short_submit=odd)
    if not isinstance(odd, str):
        with pytest.raises(TypeError, match="backend is a"):
            Engine(odd)
        with pytest.raises(TypeError, match="path is a"):
            sync_directory(odd)
    with Slab(4096) as slab, pytest.raises(TypeError, match="nbytes="):
        slab.allocate(odd)
    if not isinstance(odd, float):
        with Slab(4096) as slab, pytest.raises(TypeError, match="timeout="):
            slab.wait_for_release(odd)
    with Engine("posix") as engine:
        check_engine(engine, odd, tmp_path)


@pytest.mark.parametrize("kind", [np.int16, np.int32, np.uint32, np.int64])
def test_numbers_of_numpy_do_not_wrap(kind: type[Any], tmp_path: Path) -> None:
    largest = kind(np.iinfo(kind).max)
    ranges = RangeAllocator(1 << 20)
    assert ranges.rounded(largest) >= int(largest)
    with Slab(1 << 14) as slab:
        with pytest.raises(SlabFullError, match=f"cannot take {largest} bytes"):
            slab.allocate(largest)
        held = slab.allocate(kind(5000))
        assert (len(held), slab.used_bytes, type(slab.free_bytes)) == (5000, 8192, int)
    ranges.grow(kind(4096))
    offset = ranges.allocate(kind(5000))
    assert offset == 0
    ranges.release(*ranges.split(kind(0), [kind(4096), kind(904)])[:1], kind(4096), kind(904))
    assert (ranges.used_bytes, ranges.free_ranges()) == (0, [(0, (1 << 20) + 4096)])
    with Engine("posix", queue_depth=kind(8), lanes=kind(1), max_pending_bytes=largest) as engine:
        assert type(engine.lanes) is int
        with engine.open(tmp_path / "data", "w", size=kind(30_000)) as file:
            file.allocate(kind(10_000), kind(30_000))
            assert file.size() == 40_000
            file.zero(kind(10_000), kind(30_000))
            file.truncate(kind(30_000))
            assert file.size() == 30_000


def test_not_a_number_is_no_time_to_wait(tmp_path: Path) -> None:
    with Slab(4096) as slab, pytest.raises(ValueError, match="timeout=nan"):
        slab.wait_for_release(float("nan"))
    with Engine("posix") as engine, engine.open(tmp_path / "data", "w") as file:
        operation = engine.write(file, 0, b"x")
        with pytest.raises(ValueError, match="timeout=nan"):
            operation.result(float("nan"))


def check_engine(engine: Engine, odd: Any, folder: Path) -> None:
    with pytest.raises(TypeError, match="size="):
        engine.open(folder / "new", "w", size=odd)
    assert not (folder / "new").exists()
    if not isinstance(odd, str):
        with pytest.raises(TypeError, match="path is a"):
            engine.open(odd)
    with engine.open(folder / "data", "w") as file:
        for name, call in {
            "file": lambda: engine.read(odd, 0, bytearray(1)),
            "offset": lambda: engine.write(file, odd, b"x"),
            "lane": lambda: engine.write(file, 0, b"x", lane=odd),
            "requests": lambda: engine.submit(odd),
            "nbytes": lambda: file.truncate(odd),
            "allocate": lambda: file.allocate(0, odd),
        }.items():
            with pytest.raises(TypeError, match="nbytes=" if name == "allocate" else name):
                call()
        if not isinstance(odd, float):
            operation = engine.submit([Request("write", file, 0, b"x")])[0]
            with pytest.raises(TypeError, match="timeout="):
                operation.result(odd)
        file.sync()
    assert (folder / "data").stat().st_size <= 1
