"""Builds `checkpoint._native`: CRC-32C in C, alone or fused with copies, and memory of arenas.

google-crc32c is as fast, but lets go of the interpreter lock only for `bytes` objects, which
staging memory never is, and cannot copy while it sums.
"""

from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
CSRC = Path("checkpoint", "csrc")
"""Relative to ROOT, as setuptools wants its sources."""

ffibuilder = FFI()
ffibuilder.cdef(
    """
    uint32_t ckpt_crc32c(uint32_t crc, const void *data, size_t nbytes);
    void ckpt_copy_crc32c(size_t count, const uint64_t *src, const uint64_t *dst,
                          const uint64_t *nbytes, uint32_t *crc);
    const char *ckpt_crc32c_isa(void);
    enum ckpt_crc32c_way { CKPT_CRC32C_TABLES, CKPT_CRC32C_INSTRUCTION, CKPT_CRC32C_FOLDING };
    void ckpt_crc32c_at_most(enum ckpt_crc32c_way highest);
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
    '#pragma GCC diagnostic ignored "-Wconversion"\n#include "arena.h"\n#include "crc32c.h"\n',
    sources=[str(CSRC / name) for name in ("arena.c", "crc32c.c", "crc32c_fold.c")],
    include_dirs=[str(CSRC)],
    depends=[str(CSRC / name) for name in ("arena.h", "crc32c.h", "crc32c_fold.h")],
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
