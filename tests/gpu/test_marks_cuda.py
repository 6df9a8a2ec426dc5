"""Moments of a CUDA device, by its events."""

import time

import pytest
import torch

from swap.marks import marks_on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def test_marks_on_cuda_enclose_what_was_computed_between_them() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    began = time.perf_counter()
    mark = marks_on(device)
    values = torch.ones(2048, 2048, device=device)
    start = mark()
    for _ in range(8):
        values = values @ values
    stop = mark()
    torch.cuda.synchronize(device)
    first, last = start.seconds(), stop.seconds()
    assert first is not None
    assert last is not None
    assert began < first < last < time.perf_counter() + 0.01
