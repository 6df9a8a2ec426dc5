"""Gradients between backward and update: kept 16 (or 32) bits wide in host memory, spilled to NVME
beyond it.

A gradient is accumulated in its parameter's own dtype, as autograd would, so several backward
passes give the bits that they give in plain PyTorch. Its sum of squares is taken while it is in
cache, in an order that does not depend on where it is kept, so the norm costs no pass of its own
and is the same under every budget.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterable
from functools import partial

import torch

from aio import AioError, Operation, Slab
from aio.errors import advise, let_go
from swap.device.homes import DeviceHomes
from swap.gradients.on_device import DeviceGradients, added_up
from swap.gradients.spill import AGAIN, SpillWriter, advised
from swap.kernels import block_squares, sum_of_squares
from swap.plain import check_memory, is_plain
from swap.plan.layout import PIECE, Layout, Segment
from swap.plan.placement import Placement
from swap.plan.sizes import gradient_bytes
from swap.storage.components import as_bytes, as_tensor, page_aligned
from swap.storage.extents import Extent, ExtentStore
from swap.storage.volumes import place_in
from swap.tiers import Tier
from swap.timeline import Timeline


class GradientStore:
    """One accumulated gradient for each parameter that got one since the last step.

    ``add`` and ``clear`` are for one thread at a time; ``stage`` and ``release`` may run on another
    for parameters that were captured.
    """

    def __init__(
        self,
        placement: Placement,
        slab: Slab | None,
        spill: Slab | None,
        extents: ExtentStore | None,
        timeline: Timeline,
        homes: DeviceHomes | None = None,
    ) -> None:
        self._layout: Layout = placement.layout
        self._extents = extents
        self._writer: SpillWriter | None = None
        if spill is not None:
            assert extents is not None
            self._writer = SpillWriter(spill, extents, timeline)
        self._timeline = timeline
        self._chunk_bytes = placement.spill_chunk_bytes
        self._host: dict[int, torch.Tensor] = {}
        # Extents are kept from step to step: what else fills the disk cannot take their place.
        self._on_nvme: dict[int, Extent] = {}
        self._spilled: set[int] = set()
        self._squares: dict[int, float] = {}
        self._begun: dict[int, _Squares] = {}
        """Of gradients of which a part has come."""
        self._lost: dict[int, Callable[[], Exception]] = {}
        self.keep_blocks = False
        """Whether ``block_squares`` can be asked for; to be set before the first gradient."""
        self._blocks: dict[int, list[torch.Tensor]] = {}
        self._device = None if homes is None else DeviceGradients(placement, homes)
        self._unread: set[int] = set()
        """Parameters whose sums of squares are on the device still."""
        for group in self._layout.subgroups:
            home = placement.gradient_home[group.index] if group.trainable else None
            if home is Tier.HOST:
                assert slab is not None
                buffer = slab.allocate(gradient_bytes(group))
                self._host[group.index] = as_tensor(buffer, group.dtype)
            elif home is Tier.NVME:
                assert extents is not None
                self._on_nvme[group.index] = extents.allocate(gradient_bytes(group))
        if extents is not None:
            extents.transfers.tell_owner(self.owner_of)

    def owner_of(self, directory: int, offset: int) -> str | None:
        """Whose the bytes there are, in words; None where no gradient is."""
        for subgroup, extent in self._on_nvme.items():
            at = place_in(extent, directory, offset)
            if at is not None:
                group = self._layout.subgroups[subgroup]
                first = at // group.dtype.itemsize
                touched = (s for s in group.segments if s.offset <= first < s.offset + s.length)
                names = [self._layout.specs[segment.parameter].name for segment in touched]
                return f"the gradient of {', '.join(names) or 'no parameter (padding)'}"
        return None

    @property
    def present(self) -> frozenset[int]:
        """Parameters that have a gradient."""
        return frozenset(self._squares)

    @property
    def lost(self) -> frozenset[int]:
        """Parameters whose gradient did not arrive whole, and was not cleared since."""
        return frozenset(self._lost)

    def lose(self, parameter: int, failure: BaseException) -> None:
        """The gradient of ``parameter`` did not arrive whole: it has none, and ``check`` raises
        until it is cleared.

        What is kept is no exception but its text: with a traceback it would keep buffers.
        """
        name = self._layout.specs[parameter].name
        self._lost.setdefault(parameter, _loss_of(name, failure))
        self._squares.pop(parameter, None)
        self._begun.pop(parameter, None)

    def check(self) -> None:
        """Raise for a gradient that was lost: ``AioError`` after an I/O error, else
        ``RuntimeError``.
        """
        for error in list(self._lost.values()):
            raise error()

    def check_present(self, parameters: Iterable[int]) -> None:
        """Raises ``RuntimeError`` where one that a step began with is not there any more: what lies
        in its place is of some step before.
        """
        if gone := sorted({*parameters} - self.present):
            raise RuntimeError(
                f"the gradient of {self._layout.specs[gone[0]].name} was cleared as step() used "
                "it, by a load(), restore() or zero_grad() of another thread; nothing of the step "
                "is done: take steps on the thread that loads, or while none does"
            )

    def norm(self) -> float:
        """The 2-norm over all present gradients, in parameter order."""
        squares = self._squares.copy()  # another thread may clear some, which then stay cleared
        unread = self._unread & squares.keys()
        if self._device is not None and unread:
            sums = self._device.sums()
            squares |= {parameter: added_up(sums(parameter)) for parameter in unread}
            self._squares.update({p: squares[p] for p in unread if p in self._squares})
        self._unread.clear()
        return math.sqrt(sum(squares[parameter] for parameter in sorted(squares)))

    def block_squares(self, parameter: int) -> torch.Tensor:
        """The sums of squares of a present gradient, float64, one for each ``PIECE`` elements; only
        of a store that keeps them. Added up in order they are what the norm is made of.
        """
        if self._device is not None and self.is_on_device(parameter):
            return self._device.block_squares(parameter)
        none = torch.empty(0, dtype=torch.float64, device="cpu")  # of one without elements
        return torch.cat([none, *self._blocks[parameter]])

    def check_memory(self, parameter: int, gradient: torch.Tensor) -> None:
        """Raise ``ValueError`` for a gradient whose values cannot be read: it is lost."""
        try:
            check_memory(f"the gradient of {self._layout.specs[parameter].name}", gradient)
        except ValueError as failure:
            self.lose(parameter, let_go(failure))
            raise

    def add(self, parameter: int, gradient: torch.Tensor) -> None:
        """Set or accumulate the gradient of ``parameter``, in the parameter's dtype. The caller
        may reuse ``gradient`` on return, and has asked ``check_memory``.

        Raises ``AioError`` when spilling fails, be it of a gradient that was added before; then
        the gradient of ``parameter`` is lost, because it may be half accumulated: see ``lose``.
        """
        try:
            if self._device is not None and self.is_on_device(parameter):
                self._device.add(parameter, gradient, accumulate=parameter in self._squares)
                self._unread.add(parameter)
                self._squares[parameter] = math.nan  # until somebody asks
                return
            self.add_part(parameter, 0, gradient.detach().reshape(-1), is_last=True)
        except BaseException as failure:
            self.lose(parameter, let_go(failure))
            name = self._layout.specs[parameter].name
            advise(failure, f"by that the gradient of {name} was lost: mend that, then {AGAIN}")
            raise

    def add_part(self, parameter: int, start: int, values: torch.Tensor, *, is_last: bool) -> None:
        """As ``add``, of flat elements from ``start``, all parts in order, the first from 0; all
        but the last one have whole blocks of ``PIECE``. Its caller tells ``lose`` of errors.
        """
        accumulate = parameter in self._squares
        if start == 0:
            self._begun[parameter] = _Squares([] if self.keep_blocks else None)
        squares = self._begun[parameter]
        self._store(parameter, start, values, accumulate, squares)
        if is_last:
            if squares.blocks is not None:
                self._blocks[parameter] = squares.blocks
            self._squares[parameter] = squares.total
            del self._begun[parameter]

    def _store(
        self, parameter: int, start: int, flat: torch.Tensor, accumulate: bool, squares: _Squares
    ) -> None:
        stop = start + flat.numel()
        for segment in self._layout.segments_of[parameter]:
            first = max(start, segment.start)
            length = min(stop, segment.start + segment.length) - first
            if length <= 0:
                continue
            offset, part = first - segment.start, flat[first - start : first - start + length]
            if segment.subgroup in self._host:
                target = self._host[segment.subgroup][segment.offset + offset :][:length]
                _accumulate(target, part, accumulate, squares)
            else:
                self._spill_part(segment, offset, part, accumulate, squares)

    def read(self, parameter: int) -> torch.Tensor:
        """A copy of the gradient of ``parameter``, flat."""
        spec = self._layout.specs[parameter]
        # In parts that begin at whole pages, as spilled gradients do.
        out = page_aligned(spec.weight_bytes).view(spec.dtype)
        if self._device is not None and self.is_on_device(parameter):
            self._device.read(parameter, out)
            return out
        for segment in self._layout.segments_of[parameter]:
            part = out[segment.start : segment.start + segment.length]
            if segment.subgroup in self._host:
                home = self._host[segment.subgroup]
                part.copy_(home[segment.offset : segment.offset + segment.length])
            else:
                with advised():
                    self._wait_for_spills(segment.subgroup)
                start = segment.offset * part.dtype.itemsize
                self._read(segment.subgroup, start, part).result()
        return out

    def clear(self, parameter: int | None = None) -> None:
        """Forget the gradient of ``parameter``, or of all; those captured by a step are not
        touched.
        """
        gone = self.present | self.lost
        if self._writer is not None:
            self._writer.forget(gone if parameter is None else gone & {parameter})
        if parameter is None:
            self._squares.clear()
            self._lost.clear()
        else:
            self._squares.pop(parameter, None)
            self._lost.pop(parameter, None)

    def capture(self) -> frozenset[int]:
        """Hand what is present to a step: it is no longer present, and stays readable until
        released.
        """
        captured = self.present
        self._squares.clear()
        return captured

    def is_array(self, subgroup: int) -> bool:
        """Whether it is in memory, of the host or of the device."""
        return subgroup in self._host or (self._device is not None and self._device.has(subgroup))

    def array(self, subgroup: int) -> torch.Tensor:
        if self._device is not None and self._device.has(subgroup):
            return self._device.of(subgroup)
        return self._host[subgroup]

    def is_on_device(self, parameter: int) -> bool:
        """Whether the gradient of ``parameter`` stays on the device."""
        first = self._layout.segments_of[parameter][0].subgroup
        return self._device is not None and self._device.has(first)

    def stage(self, subgroup: int, out: torch.Tensor) -> list[Operation]:
        """Start reading the spilled gradients of a whole subgroup into ``out``."""
        self._wait_for_spills(subgroup)
        return [self._read(subgroup, 0, out)] if subgroup in self._spilled else []

    def release(self, subgroup: int) -> None:
        """The update of ``subgroup`` is done: its spilled gradients are not needed any more."""
        self._spilled.discard(subgroup)

    def flush(self) -> None:
        """Wait until every spill is on the SSD; raises ``AioError``, and waits for a second try
        then.
        """
        if self._writer is not None:
            with advised():
                self._writer.wait_for_all()

    @property
    def _spills(self) -> SpillWriter:
        """Of a placement that has gradients on NVMe."""
        assert self._writer is not None
        return self._writer

    def _wait_for_spills(self, subgroup: int) -> None:
        self._spills.wait_for(subgroup)

    def _spill_part(
        self,
        segment: Segment,
        offset: int,
        part: torch.Tensor,
        accumulate: bool,
        squares: _Squares,
    ) -> None:
        """``part`` is of the segment from its element ``offset`` on."""
        self._spilled.add(segment.subgroup)
        # Writes to the same bytes must not be in flight together: either could come last.
        if offset == 0 and accumulate:
            self._spills.wait_for_segment(segment)
        elif offset == 0:
            self._spills.discard(segment)
        dtype = self._layout.subgroups[segment.subgroup].dtype
        elements = self._chunk_bytes // dtype.itemsize // PIECE * PIECE
        for first in range(0, part.numel(), elements):
            values = part[first : first + elements]
            self._spill_chunk(segment, offset + first, values, accumulate, squares)

    def _spill_chunk(
        self,
        segment: Segment,
        first: int,
        values: torch.Tensor,
        accumulate: bool,
        squares: _Squares,
    ) -> None:
        chunk = self._spills.take(values.numel(), self._layout.subgroups[segment.subgroup].dtype)
        start = (segment.offset + first) * chunk.dtype.itemsize
        if accumulate:
            self._read(segment.subgroup, start, chunk).result()
        _accumulate(chunk[: values.numel()], values, accumulate, squares)
        self._spills.write(segment, self._on_nvme[segment.subgroup], start, chunk)

    def _read(self, subgroup: int, start: int, out: torch.Tensor) -> Operation:
        assert self._extents is not None
        operation = self._extents.read(self._on_nvme[subgroup], start, as_bytes(out), urgent=False)
        label = f"gradients of subgroup {subgroup}"
        return self._timeline.watch(operation, label, purpose="gradients")


def _loss_of(name: str, failure: BaseException) -> Callable[[], Exception]:
    """Makes the error that says so, a new one each time."""
    message = (
        f"the gradient of {name} was lost on its way to host memory ({failure or type(failure)}); "
        f"{AGAIN}"
    )
    if not isinstance(failure, OSError):
        return partial(RuntimeError, message)
    return partial(
        AioError,
        message,
        errno=failure.errno or errno.EIO,
        filename=failure.filename,
        offset=getattr(failure, "offset", None),
        nbytes=getattr(failure, "nbytes", None),
    )


class _Squares:
    """The sum of squares of one gradient, and those of its blocks if ``blocks`` is a list."""

    def __init__(self, blocks: list[torch.Tensor] | None) -> None:
        self.total = 0.0
        self.blocks = blocks

    def add(self, values: torch.Tensor, *, copy: torch.Tensor | None = None) -> None:
        """Count the next elements, whole pieces unless they are the last of a segment; with
        ``copy``, copy them there in the same pass over memory.
        """
        if values.dtype == torch.float64:
            self._add_doubles(values, copy)
        elif self.blocks is None:
            self.total = sum_of_squares(values, self.total, copy=copy)
        else:
            self.blocks.append(block_squares(values, copy=copy))
            for block_sum in self.blocks[-1].tolist():
                self.total += block_sum

    def _add_doubles(self, values: torch.Tensor, copy: torch.Tensor | None) -> None:
        """There are no kernels for float64: block sums added one by one."""
        sums = [float(block.square().sum()) for block in values.split(PIECE)]
        for block_sum in sums:
            self.total += block_sum
        if self.blocks is not None:
            self.blocks.append(torch.tensor(sums, dtype=torch.float64, device="cpu"))
        if copy is not None:
            copy.copy_(values)


def _accumulate(
    target: torch.Tensor, values: torch.Tensor, accumulate: bool, squares: _Squares
) -> None:
    if accumulate:
        target.add_(values.to(target.device))
        squares.add(target)
    elif values.dtype == target.dtype and values.is_contiguous() and is_plain(values):
        squares.add(values, copy=target)
    else:
        target.copy_(values)
        squares.add(target)
