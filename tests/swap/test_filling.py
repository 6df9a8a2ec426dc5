"""Values of many parameters at once: written behind the making of the next, within given memory."""

import errno
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from aio import AioError
from swap.plan.layout import PIECE, pack
from tests.support.tiers import (
    Plain,
    TieredRig,
    assert_same,
    placement_of,
    random_values,
    specs_of,
)

MEMORY = 16 * PIECE
SIZES = (4 * PIECE, 3, 5 * PIECE + 7, 2 * PIECE, PIECE)
Part = tuple[int, int, torch.Tensor]


def _rig(stack: ExitStack, folder: Path, dtype: torch.dtype = torch.bfloat16) -> TieredRig:
    """Every other unit on NVMe, and the second parameter in host memory for good."""
    layout = pack(specs_of(SIZES, dtype, always_on_host=(1,)), 2 * PIECE)
    placement = placement_of(layout, state_on_nvme=lambda u: u % 3 != 1, arena_bytes=64 * PIECE)
    return TieredRig(stack, folder, placement)


def _parts(plain: Plain, length: int) -> Iterator[Part]:
    """Random values of all parameters, which ``plain`` is given, too."""
    for spec in plain.specs:
        values = random_values(spec.index, spec.numel)
        plain.write(spec.index, 0, values)
        for start in range(0, spec.numel, length):
            yield spec.index, start, values[start : start + length]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [PIECE, 3 * PIECE, 1000], ids=str)
def test_what_fills_all_at_once_is_what_fills_them_one_by_one(
    stack: ExitStack, tmp_path: Path, dtype: torch.dtype, length: int
) -> None:
    rig = _rig(stack, tmp_path, dtype)
    rig.state.fill_all(_parts(rig.plain, length), MEMORY)
    assert rig.engine.num_in_flight == 0
    assert_same(rig.state, rig.plain)


def test_filling_goes_on_while_values_are_written_until_its_memory_is_full(
    stack: ExitStack, tmp_path: Path
) -> None:
    rig = _rig(stack, tmp_path)
    rig.engine.eager = 0.0
    under_way = []

    def parts() -> Iterator[Part]:
        for part in _parts(rig.plain, PIECE):
            under_way.append(rig.engine.num_in_flight)
            yield part

    rig.state.fill_all(parts(), MEMORY)
    # Chunks are an eighth of the memory; of a parameter's last values they may be smaller.
    assert 8 <= max(under_way) <= 16
    assert rig.engine.num_in_flight == 0
    assert_same(rig.state, rig.plain)


def test_values_that_are_seen_before_they_are_filled_are_not_kept(
    stack: ExitStack, tmp_path: Path
) -> None:
    rig = _rig(stack, tmp_path)
    for spec in rig.plain.specs:
        rig.state.weights.borrow(spec.index)
    before = rig.state.num_changes
    rig.state.fill_all(_parts(rig.plain, PIECE), MEMORY)
    assert rig.state.num_changes > before
    for spec in rig.plain.specs:
        assert torch.equal(rig.state.weights.borrow(spec.index), rig.plain.weight(spec.index))


@pytest.mark.parametrize("after", [0, 5, 11])
def test_a_write_that_fails_is_raised_when_all_have_ended(
    stack: ExitStack, tmp_path: Path, after: int
) -> None:
    rig = _rig(stack, tmp_path)
    rig.faults.arm("write", errno.EIO, after=after)
    with pytest.raises(AioError) as caught:
        rig.state.fill_all(_parts(rig.plain, PIECE), MEMORY)
    assert caught.value.errno == errno.EIO
    assert rig.engine.num_in_flight == 0
    rig.faults.disarm()
    rig.state.fill_all(_parts(rig.plain, PIECE), MEMORY)
    assert_same(rig.state, rig.plain)


def test_values_that_cannot_be_made_stop_the_filling_when_writes_have_ended(
    stack: ExitStack, tmp_path: Path
) -> None:
    rig = _rig(stack, tmp_path)
    rig.engine.eager = 0.0

    def parts() -> Iterator[Part]:
        for number, part in enumerate(_parts(rig.plain, PIECE)):
            if number == 9:
                assert rig.engine.num_in_flight > 0
                raise LookupError("no more")
            yield part

    with pytest.raises(LookupError, match="no more"):
        rig.state.fill_all(parts(), MEMORY)
    assert rig.engine.num_in_flight == 0
