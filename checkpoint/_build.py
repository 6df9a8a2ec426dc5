"""Builds `checkpoint._native`: memory of arenas."""

from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
CSRC = Path("checkpoint", "csrc")
"""Relative to ROOT, as setuptools wants its sources."""

ffibuilder = FFI()
ffibuilder.cdef(
    """
    struct ckpt_arena;
    struct ckpt_range { struct ckpt_arena *arena; void *data; size_t nbytes; };
    int ckpt_arena_new(struct ckpt_arena **arena, size_t nbytes);
    void ckpt_arena_drop(struct ckpt_arena **arena);
    void ckpt_range_take(struct ckpt_range *range, struct ckpt_arena *arena, size_t first,
                         size_t nbytes);
    void ckpt_range_drop(struct ckpt_range *range);
    """
)
ffibuilder.set_source(
    "checkpoint._native",
    # What cffi generates around the calls converts freely between integers.
    '#pragma GCC diagnostic ignored "-Wconversion"\n#include "arena.h"\n',
    sources=[str(CSRC / "arena.c")],
    include_dirs=[str(CSRC)],
    depends=[str(CSRC / "arena.h")],
    extra_compile_args=[
        "-std=c11",
        "-D_GNU_SOURCE",
        "-O3",
        "-ffp-contract=off",
        "-fvisibility=hidden",
        "-pthread",
        "-Wall",
        "-Wextra",
        "-Wconversion",
        "-Werror",
    ],
    extra_link_args=["-pthread"],
    py_limited_api=True,
)

if __name__ == "__main__":
    ffibuilder.compile(tmpdir=str(ROOT))
