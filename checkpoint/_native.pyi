"""The cffi module built by ``_build.py``; the headers in ``csrc`` say what the functions do."""

from cffi import FFI

class _Lib:
    def ckpt_arena_new(self, arena: FFI.CData, nbytes: int, /) -> int: ...
    def ckpt_arena_drop(self, arena: FFI.CData, /) -> None: ...
    def ckpt_range_take(
        self, taken: FFI.CData, arena: FFI.CData, first: int, nbytes: int, /
    ) -> None: ...
    def ckpt_range_drop(self, taken: FFI.CData, /) -> None: ...

ffi: FFI
lib: _Lib
