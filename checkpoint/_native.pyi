"""The cffi module built by ``_build.py``; the headers in ``csrc`` say what the functions do."""

from cffi import FFI

class _Lib:
    def ckpt_crc32c(self, crc: int, data: FFI.CData, nbytes: int, /) -> int: ...
    def ckpt_copy_crc32c(
        self,
        count: int,
        src: FFI.CData,
        dst: FFI.CData,
        nbytes: FFI.CData,
        crc: FFI.CData,
        /,
    ) -> None: ...
    def ckpt_crc32c_isa(self) -> FFI.CData: ...
    def ckpt_crc32c_at_most(self, highest: int, /) -> None: ...
    def ckpt_arena_new(self, arena: FFI.CData, nbytes: int, /) -> int: ...
    def ckpt_arena_drop(self, arena: FFI.CData, /) -> None: ...
    def ckpt_range_take(
        self, taken: FFI.CData, arena: FFI.CData, first: int, nbytes: int, /
    ) -> None: ...
    def ckpt_range_drop(self, taken: FFI.CData, /) -> None: ...

    CKPT_CRC32C_TABLES: int
    CKPT_CRC32C_INSTRUCTION: int
    CKPT_CRC32C_FOLDING: int

ffi: FFI
lib: _Lib
