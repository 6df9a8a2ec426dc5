"""Ten thousand openings and closings leave no descriptor, no thread and no memory behind."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest

from aio import AioError, Backend, Engine
from aio.backends import NAMES
from tests.aio.conftest import run_python

pytestmark = pytest.mark.proof

_CYCLES = 10_000
_SLOWER = {"libaio": 300}
"""The kernel takes tens of milliseconds to end a context of its own."""
_LEAST_LEAK = 16
"""Bytes in each cycle: no allocation takes less."""
_SCRIPT = """
    import ctypes, gc, json, os, sys
    from pathlib import Path
    import numpy as np
    from aio import Engine, Slab
    from checkpoint.tensors.arenas import Arenas

    class Held(ctypes.Structure):
        names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Held

    def count():
        gc.collect()
        maps = len(Path("/proc/self/maps").read_text().splitlines())
        numbers = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        held = mallinfo()
        return [*numbers, maps, held.uordblks + held.hblkhd]

    what, where, cycles = sys.argv[1], sys.argv[2], int(sys.argv[3])
    one = np.zeros(4096, np.uint8)
    shared = Engine("posix")

    def engine():
        with Engine(what, queue_depth=2) as engine, engine.open(where, "w") as file:
            engine.write(file, 0, one).result()

    def file():
        with shared.open(where, "w") as file:
            shared.write(file, 0, one).result()
            file.sync()

    def slab():
        slab = Slab(1 << 20)
        ranges = [slab.allocate(4096) for _ in range(3)]

    def arena():
        arenas = Arenas()
        ranges = [arenas.allocate(nbytes) for nbytes in (1, 5000, 1 << 20)]
        ranges[1][:] = 1

    cycle = {"file": file, "slab": slab, "arena": arena}.get(what, engine)
    for _ in range(200):
        cycle()
    counts = [count()]
    for _ in range(5):
        for _ in range(cycles // 5):
            cycle()
        counts.append(count())
    print(json.dumps(counts))
"""


@pytest.mark.parametrize("what", [*NAMES, "file", "slab", "arena"])
def test_ten_thousand_cycles_leave_nothing_behind(what: str, tmp_path: Path) -> None:
    if what in NAMES:
        try:
            Engine(cast(Backend, what)).close()
        except AioError as error:
            pytest.skip(str(error))
    cycles = _SLOWER.get(what, _CYCLES)
    arguments = (what, str(tmp_path / "data.bin"), str(cycles))
    (line,) = run_python(_SCRIPT, *arguments, PYTHONMALLOC="malloc")
    counts = json.loads(line)
    descriptors, threads, mappings, _ = zip(*counts, strict=True)
    assert len(set(descriptors)) == len(set(threads)) == 1
    assert mappings[-1] - mappings[0] < 20
    # What is made once, whenever that is, is no leak: that shows in each of the parts.
    grown = [after[3] - before[3] for before, after in pairwise(counts)]
    assert min(grown) < cycles // 5 * _LEAST_LEAK, f"bytes in each part: {grown}"
