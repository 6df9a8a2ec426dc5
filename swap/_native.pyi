"""The cffi module built by ``_build.py``; ``csrc/kernels.h`` says what the functions do."""

from cffi import FFI

class _Lib:
    SWAP_F32: int
    SWAP_BF16: int
    SWAP_F16: int
    SWAP_HALVES: int
    SWAP_COPY_BF16: int
    SWAP_COPY_F16: int
    SWAP_MASTER_ONLY: int
    SWAP_DECAY_WEIGHT: int
    SWAP_DECAY_GRADIENT: int
    SWAP_MOMENTS_F32: int
    SWAP_MOMENTS_BF16: int
    SWAP_MOMENTS_U8: int
    SWAP_BLOCK: int
    SWAP_MOMENT_BLOCK: int

    def swap_adam_step(self, job: FFI.CData, old: FFI.CData, threads: int, /) -> int: ...
    def swap_split(
        self, master: FFI.CData, hi: FFI.CData, lo: FFI.CData, n: int, threads: int, /
    ) -> int: ...
    def swap_merge(
        self, hi: FFI.CData, lo: FFI.CData, master: FFI.CData, n: int, threads: int, /
    ) -> int: ...
    def swap_copy(
        self, source: FFI.CData, target: FFI.CData, nbytes: int, threads: int, /
    ) -> int: ...
    def swap_block_squares(
        self,
        values: FFI.CData,
        value_float: int,
        n: int,
        copy: FFI.CData,
        sums: FFI.CData,
        threads: int,
        /,
    ) -> int: ...
    def swap_sum_of_squares(
        self,
        values: FFI.CData,
        value_float: int,
        n: int,
        copy: FFI.CData,
        total: FFI.CData,
        threads: int,
        /,
    ) -> int: ...
    def swap_use_pool(self) -> None: ...
    def swap_isa_name(self, index: int, /) -> FFI.CData: ...
    def swap_isa(self) -> int: ...
    def swap_set_isa(self, index: int, /) -> int: ...

ffi: FFI
lib: _Lib
