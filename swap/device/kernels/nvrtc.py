"""Compiles CUDA C at run time and launches it: NVRTC and the driver through their C interfaces.

NVRTC comes with torch for CUDA, and needs neither a toolkit nor headers. What cannot be compiled or
loaded is a ``CompileError``, which says why.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import SupportsInt

import torch

NVRTC_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
DRIVER_NAME = "libcuda.so.1"


class CompileError(RuntimeError):
    """A kernel could not be compiled, loaded or started."""


class Kernel:
    """A kernel that is loaded in the context of a device, whose only argument is a struct."""

    def __init__(self, device: torch.device, cubin: bytes, name: str) -> None:
        """Raises ``CompileError`` with the driver's reason."""
        try:
            self._driver = ctypes.CDLL(DRIVER_NAME)
        except OSError as error:
            raise CompileError(f"cannot load the CUDA driver: {error}") from error
        self._device = device
        self._context = ctypes.c_void_p()
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        torch.cuda.init()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device.index)
        with self._current():
            self._call("cuModuleLoadData", ctypes.byref(self._module), cubin)
            arguments = ctypes.byref(self._function), self._module, name.encode()
            self._call("cuModuleGetFunction", *arguments)

    def launch(self, argument: SupportsInt, *, num_blocks: int, num_threads: int) -> None:
        """Start it on torch's current stream of the device; the struct, at the address
        ``argument``, is copied. Raises ``CompileError`` with the driver's reason.
        """
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        sizes = (ctypes.c_uint(size) for size in (num_blocks, 1, 1, num_threads, 1, 1, 0))
        arguments = (ctypes.c_void_p * 1)(int(argument))
        with self._current():
            self._call("cuLaunchKernel", self._function, *sizes, stream, arguments, None)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Within, calls of this thread are for torch's context of the device: a new thread has
        none.
        """
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"no such error").decode()
            raise CompileError(f"{name} failed on {self._device} with error {code}: {reason}")


def compile_kernel(source: str, *, architecture: str, options: Sequence[str]) -> bytes:
    """The machine code of CUDA C ``source`` for an ``architecture`` such as ``sm_90``.

    Raises ``CompileError`` with what the compiler says, or where there is no compiler.
    """
    nvrtc = _load_nvrtc()
    program = ctypes.c_void_p()
    _check_nvrtc(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
        ),
    )
    try:
        flags = [f"--gpu-architecture={architecture}".encode(), *(o.encode() for o in options)]
        code = nvrtc.nvrtcCompileProgram(
            program, len(flags), (ctypes.c_char_p * len(flags))(*flags)
        )
        if code != 0:
            log = _text(nvrtc, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            raise CompileError(f"a kernel does not compile for {architecture}: {log.strip()}")
        return _text(nvrtc, "CUBIN", program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check_nvrtc(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check_nvrtc(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, text))
    return text.raw


def _check_nvrtc(nvrtc: ctypes.CDLL, code: int) -> None:
    if code != 0:
        error_string = nvrtc.nvrtcGetErrorString
        error_string.restype = ctypes.c_char_p
        raise CompileError(f"NVRTC failed with error {code}: {error_string(code).decode()}")


def _load_nvrtc() -> ctypes.CDLL:
    failures = []
    for name in _candidates():
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            failures.append(str(error))
    raise CompileError(f"there is no NVRTC to compile with ({failures[0]})")


def _candidates() -> Iterator[str]:
    """Of torch's own major version first; then where packages of pip have it."""
    major = (torch.version.cuda or "").partition(".")[0]
    names = sorted(NVRTC_NAMES, key=lambda name: name != f"libnvrtc.so.{major}")
    yield from names
    spec = importlib.util.find_spec("nvidia")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        for name in names:
            yield from map(str, sorted(Path(folder).glob(f"*/lib/{name}")))
