"""Arguments of another type are refused by name, before anything is touched."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aio import Engine, MemoryBackend, RangeAllocator, Request, Slab, sync_directory

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
    with Engine("posix") as engine:
        check_engine(engine, odd, tmp_path)


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
