"""Builds ``swap._native``, the optimizer kernels in ``csrc``: through setup.py, or run in place."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
CSRC = Path("swap", "csrc")
"""Relative to ROOT, as setuptools wants its sources."""

SOURCES = [
    "pool.c",
    "isa.c",
    "kernels.c",
    "kernels_avx512.c",
    "kernels_avx2.c",
    "kernels_neon.c",
    "kernels_scalar.c",
]

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

ffibuilder = FFI()
ffibuilder.cdef(
    """
    #define SWAP_BLOCK ...
    #define SWAP_MOMENT_BLOCK ...
    enum swap_float { SWAP_F32, SWAP_BF16, SWAP_F16, ... };
    enum swap_layout { SWAP_HALVES, SWAP_COPY_BF16, SWAP_COPY_F16, SWAP_MASTER_ONLY, ... };
    enum swap_decay { SWAP_DECAY_WEIGHT, SWAP_DECAY_GRADIENT, ... };
    enum swap_moments { SWAP_MOMENTS_F32, SWAP_MOMENTS_BF16, SWAP_MOMENTS_U8, ... };

    struct swap_adam {
        void *weight;
        void *rest;
        void *exp_avg;
        void *exp_avg_sq;
        float *exp_avg_scale;
        float *exp_avg_sq_scale;
        const void *grad;
        int64_t n;
        int32_t layout;
        int32_t grad_float;
        int32_t decay_mode;
        int32_t moments;
        uint64_t parameter;
        uint64_t step;
        int64_t first;
        float decay;
        float grad_scale;
        float one_minus_beta1;
        float beta2;
        float one_minus_beta2;
        float bias2_sqrt;
        float eps;
        float minus_step_size;
    };

    int swap_adam_step(const struct swap_adam *job, int threads);
    int swap_split(const float *master, uint16_t *hi, int16_t *lo, int64_t n, int threads);
    int swap_merge(const uint16_t *hi, const int16_t *lo, float *master, int64_t n, int threads);
    int swap_copy(const void *from, void *to, int64_t nbytes, int threads);
    int swap_block_squares(const void *values, int value_float, int64_t n, void *copy,
                           double *sums, int threads);
    int swap_sum_of_squares(const void *values, int value_float, int64_t n, void *copy,
                            double *sum, int threads);
    void swap_use_pool(void);
    const char *swap_isa_name(int index);
    int swap_isa(void);
    int swap_set_isa(int index);
    """
)
ffibuilder.set_source(
    "swap._native",
    # What cffi generates around the calls converts freely between integers.
    '#pragma GCC diagnostic ignored "-Wconversion"\n#include "kernels.h"\n',
    sources=[str(CSRC / name) for name in SOURCES],
    include_dirs=[str(CSRC)],
    depends=[
        str(CSRC / name)
        for name in (
            "kernels.h",
            "dispatch.h",
            "pool.h",
            "vectors.h",
            "kernels_impl.h",
            "moments_impl.h",
        )
    ],
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
