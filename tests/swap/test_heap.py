"""The thresholds of glibc's allocator while state is offloaded; each test in a process of its own,
because what it changes cannot be changed back.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from swap.memory.heap import _glibc

needs_glibc = pytest.mark.skipif(
    _glibc("malloc_trim") is None, reason="malloc is not glibc's: nothing is done there"
)
_PRELUDE = """
import ctypes
from swap.memory.heap import MMAP_THRESHOLD_BYTES, SmallHeap

libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def is_mapped(nbytes):  # by the bit that glibc keeps before the memory
    memory = libc.malloc(nbytes)
    bits = ctypes.c_size_t.from_address(memory - ctypes.sizeof(ctypes.c_size_t)).value
    libc.free(memory)
    return bool(bits & 2)

MIB = 1 << 20
assert is_mapped(8 * MIB) and not is_mapped(4 * MIB), "the threshold did not grow"
"""


def run(program: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PRELUDE + program],
        env={"PATH": "/usr/bin:/bin", **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@needs_glibc
def test_small_heap_entered_maps_memory_that_was_on_the_heap() -> None:
    run("""
with SmallHeap():
    assert is_mapped(4 * MIB) and is_mapped(MMAP_THRESHOLD_BYTES)
    assert not is_mapped(MMAP_THRESHOLD_BYTES // 2)
    assert is_mapped(16 * MIB) and is_mapped(4 * MIB), "the threshold grew"
assert not is_mapped(4 * MIB), "every tensor of the program is mapped for good"
assert is_mapped(40 * MIB)
""")


@needs_glibc
def test_small_heap_ends_with_the_last_that_leaves_and_may_be_left_twice() -> None:
    run("""
first, second = SmallHeap(), SmallHeap()
first.__enter__()
second.__enter__()
first.__exit__()
first.__exit__()
assert is_mapped(4 * MIB)
second.__exit__()
assert not is_mapped(4 * MIB)
first.__exit__()
with SmallHeap():
    assert is_mapped(4 * MIB)
""")


@needs_glibc
def test_small_heap_in_a_child_forked_while_another_thread_enters_does_not_wait() -> None:
    run("""
import os, signal, threading
from swap.memory import heap

entered, forked = threading.Event(), threading.Event()

def hold():
    with heap._lock:
        entered.set()
        forked.wait()

thread = threading.Thread(target=hold)
thread.start()
entered.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    with SmallHeap():
        assert is_mapped(4 * MIB)
    assert not is_mapped(4 * MIB)
    os._exit(0)
forked.set()
thread.join()
assert os.waitpid(child, 0)[1] == 0
with SmallHeap():
    assert is_mapped(4 * MIB)
""")


@needs_glibc
def test_small_heap_under_another_malloc_does_nothing(tmp_path: Path) -> None:
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(
        "#include <stddef.h>\nextern void *__libc_malloc(size_t);\n"
        "void *malloc(size_t n) { return __libc_malloc(n); }\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    run("with SmallHeap():\n    assert not is_mapped(4 * MIB)\n", LD_PRELOAD=str(library))
