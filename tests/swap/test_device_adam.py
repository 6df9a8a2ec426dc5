"""Kernels for devices, as operations of torch and as the text of the CUDA kernels compiled for the
CPU: both give the bits of the C kernels.
"""

import ctypes
import logging
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from swap._native import ffi
from swap.adam import FLOATS, MOMENT_BLOCK, AdamHyper, AdamTensors, Origin, adam_job
from swap.device.kernels import adam, compiled, elementwise, nvrtc, squares
from swap.kernels import BLOCK, block_squares
from tests.support.adam_steps import (
    GRADS,
    HYPER,
    LAYOUTS,
    MOMENTS,
    Step,
    assert_steps_alike,
    steps,
    tensors_of,
    usual,
)
from tests.support.examples import examples
from tests.support.tiers import same_bits

ROOT = Path(__file__).parents[2]
CHUNK = 2 * MOMENT_BLOCK


def _by_torch(tensors: AdamTensors, hyper: AdamHyper, origin: Origin) -> None:
    adam.adam_step(tensors, hyper, origin=origin)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    folders = [f"-I{ROOT / 'swap' / folder}" for folder in ("csrc", "device/kernels")]
    options = ["-std=gnu11", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    source = Path(__file__).with_name("cuda_shim.c")
    command: list[str | Path] = ["gcc", *options, "-shared", "-fPIC", *folders]
    command += ["-o", library, source, "-lm"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def by_text(shim: ctypes.CDLL) -> Step:
    def step(tensors: AdamTensors, hyper: AdamHyper, origin: Origin) -> None:
        job = adam_job(tensors, hyper, origin)
        address = ctypes.c_void_p(int(ffi.cast("uintptr_t", job)))
        assert shim.adam_grid(address, ctypes.c_uint(3)) == 0, "threads part at a barrier"

    return step


@pytest.mark.parametrize("moments", MOMENTS, ids=str)
@pytest.mark.parametrize("grad", GRADS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wild", [False, True], ids=["usual", "wild"])
def test_step_has_the_bits_of_the_c_kernel(
    layout: str, grad: torch.dtype, moments: torch.dtype, wild: bool, by_text: Step
) -> None:
    tensors = tensors_of(layout, grad, moments, 3_001, seed=1, wild=wild)
    origin = Origin(parameter=3, first=5 * MOMENT_BLOCK)
    other = replace(HYPER, grad_scale=-0.3, beta1=0.5, decoupled=False)
    for hyper in (HYPER, other):
        assert_steps_alike(_by_torch, tensors, hyper, origin)
        assert_steps_alike(by_text, tensors, hyper, origin)


@settings(max_examples=examples(150), deadline=None)
@given(step=steps())
def test_any_step_by_torch_has_the_bits_of_the_c_kernel(
    step: tuple[AdamTensors, AdamHyper, Origin],
) -> None:
    assert_steps_alike(_by_torch, *step)


@settings(max_examples=examples(150), deadline=None)
@given(step=steps())
def test_any_step_by_the_cuda_text_has_the_bits_of_the_c_kernel(
    by_text: Step, step: tuple[AdamTensors, AdamHyper, Origin]
) -> None:
    assert_steps_alike(by_text, *step)


def test_step_over_every_tie_and_its_neighbours_has_the_bits_of_the_c_kernel(
    by_text: Step,
) -> None:
    """Masters that nothing is added to, rounded to each kind of copy."""
    high = torch.arange(1 << 16, dtype=torch.int32) << 16
    masters = torch.cat([high | low for low in (0x7FFF, 0x8000, 0x8001)]).view(torch.float32)
    half_ties = torch.cat([(high >> 3) | low for low in (0xFFF, 0x1000, 0x1001)])
    masters = torch.cat([masters, half_ties.view(torch.float32)])
    n = masters.numel()
    zeros = torch.zeros(n)
    for weight in (torch.bfloat16, torch.float16):
        tensors = AdamTensors(
            weight=torch.zeros(n, dtype=weight),
            rest=masters,
            exp_avg=zeros,
            exp_avg_sq=zeros.clone(),
            grad=zeros.clone(),
        )
        for step in (_by_torch, by_text):
            assert_steps_alike(step, tensors, replace(HYPER, lr=0.0), Origin(parameter=0))


@settings(max_examples=examples(60), deadline=None)
@given(
    dtype=st.sampled_from(GRADS),
    n=st.one_of(st.integers(0, 2 * BLOCK), st.just(squares.CHUNK_BLOCKS * BLOCK + 5)),
    seed=st.integers(0, 1 << 20),
    size=st.sampled_from([1.0, 1e-20, 1e18]),
)
def test_sums_of_squares_have_the_bits_of_the_c_kernel(
    shim: ctypes.CDLL, dtype: torch.dtype, n: int, seed: int, size: float
) -> None:
    values = (usual(n, torch.float32, seed) * size).to(dtype)
    expected = block_squares(values)
    found = torch.empty_like(expected)
    squares.block_squares(values, found)
    assert same_bits(found, expected)
    found.zero_()
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (values, found))
    assert shim.squares_grid(*pointers, ctypes.c_int64(n), FLOATS[dtype], 3) == 0
    assert same_bits(found, expected)


class _Allocated(TorchDispatchMode):
    """The most bytes that were alive at once of what operations gave."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        result = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if storage._cdata not in given:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for _, nbytes in self._alive.values()))
        return result


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "CHUNK", CHUNK)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("moments", MOMENTS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_by_torch_allocates_what_is_stated(
    layout: str, moments: torch.dtype, decoupled: bool
) -> None:
    tensors = tensors_of(layout, torch.bfloat16, moments, 2 * CHUNK + 5, seed=2, wild=False)
    with _Allocated() as allocated:
        _by_torch(tensors, replace(HYPER, decoupled=decoupled), Origin(parameter=0))
    most = elementwise.SCRATCH_BYTES_PER_ELEMENT * CHUNK
    assert most // 2 < allocated.peak_bytes <= most


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("moments", MOMENTS, ids=str)
def test_step_in_chunks_has_the_bits_of_the_c_kernel(moments: torch.dtype) -> None:
    tensors = tensors_of("halves", torch.bfloat16, moments, 2_100, seed=9, wild=True)
    origin = Origin(parameter=1, first=(1 << 32) - 3 * MOMENT_BLOCK)
    assert_steps_alike(_by_torch, tensors, HYPER, origin)


def test_step_over_nothing_does_nothing() -> None:
    tensors = tensors_of("halves", torch.bfloat16, torch.uint8, 0, seed=0, wild=False)
    _by_torch(tensors, HYPER, Origin(parameter=0))


def test_step_refuses_arrays_of_different_lengths() -> None:
    tensors = tensors_of("master", torch.float32, torch.float32, 8, seed=0, wild=False)
    with pytest.raises(ValueError, match=r"grad has shape \(7,\) where \(8,\) is due"):
        _by_torch(replace(tensors, grad=tensors.grad[:7]), HYPER, Origin(parameter=0))


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(["/nowhere/libnvrtc.so"]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    yield
    compiled._code.cache_clear()
    compiled._kernel.cache_clear()


@pytest.mark.usefixtures("without_compiler")
def test_device_without_a_compiler_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert compiled.kernel_of(torch.device("cuda", 7), "adam_step") is None
        assert compiled.kernel_of(torch.device("cuda", 7), "adam_step") is None
    assert len(caplog.records) == 1
    assert "run as operations of torch" in caplog.text
    assert "there is no NVRTC to compile with (/nowhere/libnvrtc.so" in caplog.text
