"""Builds ``swap._native``, the optimizer kernels in ``csrc``: through setup.py, or run in place."""

from __future__ import annotations

import re
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
CSRC = Path("swap", "csrc")
"""Relative to ROOT, as setuptools wants its sources."""

# A new kernel is found by its file, and declared in kernels.h.
SOURCES, HEADERS = (
    [str(CSRC / path.name) for path in sorted((ROOT / CSRC).glob(pattern))]
    for pattern in ("*.c", "*.h")
)

# No option here may change a result: contraction is off, and errno and traps, which nobody looks
# at, only keep square roots and conditionals out of vectors.
COMPILE_ARGS = [
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wconversion",
    "-Werror",
]


def _declarations() -> str:
    """The part of kernels.h that is for Python, which is also valid cdef."""
    header = (ROOT / CSRC / "kernels.h").read_text(encoding="utf-8")
    match = re.search(r"/\* cffi: begin \*/(.*)/\* cffi: end \*/", header, re.DOTALL)
    assert match is not None
    return match.group(1)


ffibuilder = FFI()
ffibuilder.cdef(_declarations())
ffibuilder.set_source(
    "swap._native",
    # What cffi generates around the calls converts freely between integers.
    '#pragma GCC diagnostic ignored "-Wconversion"\n#include "kernels.h"\n',
    sources=SOURCES,
    include_dirs=[str(CSRC)],
    depends=HEADERS,
    extra_compile_args=COMPILE_ARGS,
    extra_link_args=["-pthread"],
    libraries=["m", "dl"],
    py_limited_api=True,
)

if __name__ == "__main__":
    ffibuilder.compile(tmpdir=str(ROOT))
    for objects in (ROOT / "swap", ROOT / CSRC):
        for path in objects.glob("*.o"):
            path.unlink()
