"""Builds `aio._native`, the C engine, with cffi in API mode and the stable ABI.

setup.py takes `ffibuilder` from here. `python -m aio._build` builds in place; with
`--sanitize address,undefined` (or `thread`) it builds for a run under that sanitizer.
"""

import argparse
import re
import shutil
import tempfile
from pathlib import Path

from cffi import FFI

PACKAGE = Path(__file__).resolve().parent
SOURCES = PACKAGE / "csrc"
COMPILE_ARGS = [
    *("-std=c11", "-D_GNU_SOURCE", "-O3", "-ffp-contract=off", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Wconversion", "-Werror"),
]
# The code that cffi generates converts freely; the warnings are for ours.
PREAMBLE = """
#pragma GCC diagnostic ignored "-Wconversion"
#include "api.h"
"""


def _declarations() -> str:
    """The part of api.h that is for Python, which is also valid cdef."""
    header = (SOURCES / "api.h").read_text(encoding="utf-8")
    match = re.search(r"/\* cffi: begin \*/(.*)/\* cffi: end \*/", header, re.DOTALL)
    assert match is not None
    return match.group(1)


def make_builder(folder: Path, sanitize: str = "") -> FFI:
    """An FFI that compiles `folder`/*.c; `sanitize` is what gcc's -fsanitize= takes."""
    extra = [f"-fsanitize={sanitize}", "-g", "-fno-omit-frame-pointer"] if sanitize else []
    builder = FFI()
    builder.cdef(_declarations())
    builder.set_source(
        "aio._native",
        PREAMBLE,
        sources=[str(path) for path in sorted(folder.glob("*.c"))],
        depends=[str(path) for path in sorted(folder.glob("*.h"))],
        include_dirs=[str(folder)],
        extra_compile_args=COMPILE_ARGS + extra,
        extra_link_args=extra,
        libraries=["dl", "pthread"],
        py_limited_api=True,
    )
    return builder


def build_in_place(sanitize: str = "") -> Path:
    """Compiles in a temporary folder and puts the module next to this file."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(make_builder(SOURCES, sanitize).compile(tmpdir=folder))
        # Renamed into place: a process that has the old module mapped keeps the old one.
        fresh = Path(shutil.copy(built, PACKAGE / f"{built.name}.new"))
        return fresh.replace(PACKAGE / built.name)


# setuptools runs this in the folder of setup.py and wants paths relative to that.
ffibuilder = make_builder(Path("aio", "csrc"))

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sanitize", default="", help="address,undefined or thread")
    build_in_place(parser.parse_args().sanitize)
