"""How ranks pass slices of parameters and of gradients to one another.

Every transfer begins with a meeting (see ``checkpoint.ranks.group``): all ranks say which parameter
they are about to gather or reduce, and only if they agree does a transfer start. So ranks that run
different modules, or the same ones in another order, get an error that names both, and neither hang
nor mixed-up values. The transfers themselves run in the background. Those of host memory go through
a gloo group of the block alone: what another block, or the program, moves on other threads
meanwhile is no part of it, and the process group that was given need not be there any more as the
block ends. Those of GPUs go through that. Bytes are moved and never added up, so that sums are
taken in the order of the ranks, whatever the backend.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from checkpoint.ranks.coordinator import doing
from checkpoint.ranks.group import GroupCoordinator, is_of_transfer, turn_of
from swap.interruptions.apart import run_apart
from swap.plain import check_plain

T = TypeVar("T")
GATHER, REDUCE, NORM, STEP, VALUES, SAVE, LOAD, LEAVE, CHANGE = range(1, 10)
_KINDS = {
    GATHER: "fetches the weights of",
    REDUCE: "has a gradient of",
    VALUES: "reads the values of",
    CHANGE: "changes the values of",
    NORM: "takes the norm of gradients after step",
    STEP: "takes the step after step",
    SAVE: "saves after step",
    LOAD: "loads a checkpoint",
    LEAVE: "leaves the offload block after step",
}
SMALL = -1
"""The number of a meeting about a bucket of small gradients."""
_NUMBERS = 1 << 32
"""What a meeting can be about; how many steps were taken in the block is counted above that."""


class Transfer:
    """A transfer under way into ``target``, which is copied to ``out`` if that is another tensor.
    It holds the tensors that it reads and writes.
    """

    def __init__(
        self,
        owner: Ranks,
        works: Sequence[Any],
        target: torch.Tensor,
        out: torch.Tensor,
        *held: torch.Tensor,
    ) -> None:
        self._owner = owner
        self._works = list(works)
        self._target = target
        self._out = out
        self._held = held
        self._done = False

    def wait(self) -> None:
        """Wait until it is done; idempotent. Raises ``RankFailedError``."""
        if self._done:
            return
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            if not is_of_transfer(error):
                raise
            raise self._owner.coordinator.failure_of(error) from error
        if self._target is not self._out:
            self._out.copy_(self._target)
        self._done = True
        self._works, self._held = [], ()


class Ranks:
    """The ranks that share a model: this one's number, and transfers between all of them.

    ``names`` are those of the parameters. Making one is collective. ``leave`` takes this rank out;
    nobody waits for it then.

    ``num_steps`` were taken. Where an interrupt or an error kept one rank from a step of the others
    what it has is of before that, and no meeting lets it be mixed with theirs.
    """

    def __init__(self, process_group: Any, device: torch.device) -> None:
        self.group = process_group
        self.names: Sequence[str] = ()
        self.num_steps = 0
        # gloo moves host memory alone: what is on a GPU goes by way of that.
        self._staged = device.type == "cuda" and dist.get_backend(process_group) == "gloo"
        is_of_host = self._staged or device.type == "cpu"
        with turn_of(process_group):
            self.coordinator = GroupCoordinator(process_group, name=self._name)
            self.saving = GroupCoordinator(process_group)
            """For checkpoints, which may be written on another thread."""
            self._moving = GroupCoordinator(process_group) if is_of_host else None
        self.rank = self.coordinator.rank
        self.world_size = self.coordinator.world_size
        self._global_ranks = dist.get_process_group_ranks(process_group)
        self._device = device

    def meet(self, kind: int, number: int, digest: int = 0) -> list[list[int]]:
        """Wait until all ranks are at this point. Raises ``RankFailedError``."""
        point = self.num_steps * _NUMBERS + number - SMALL
        return self.coordinator.meet(kind, point, 0, digest)

    def undivided(self, action: Callable[[], T]) -> T:
        """What ``action`` gives, which meets and starts what ranks have met for: an interrupt comes
        before or after, or the others would wait for what this rank never sends.
        """
        if threading.current_thread() is not threading.main_thread():
            return action()
        is_on_gpu = self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device) if is_on_gpu else None
        given: list[T] = []

        def run() -> None:
            with torch.cuda.stream(stream):  # it is that of a thread
                given.append(action())

        run_apart(run, "infinity-ranks")
        return given[0]

    def gather(self, part: torch.Tensor, whole: torch.Tensor, offsets: Sequence[int]) -> Transfer:
        """Bring the slices of all ranks together in ``whole``: rank ``r`` has elements
        ``[offsets[r], offsets[r + 1])`` of it, this one's being ``part``; at a point where all have
        met.
        """
        target = (
            torch.empty(whole.shape, dtype=whole.dtype, device="cpu") if self._staged else whole
        )
        own = as_bytes(part.cpu() if self._staged else part)
        slices = [as_bytes(target[low:high]) for low, high in itertools.pairwise(offsets)]
        if len({piece.numel() for piece in slices}) == 1:
            all_of_it = as_bytes(target[: offsets[-1]])
            works = [self._gather_level(all_of_it, own)]
        else:
            slices[self.rank].copy_(own)
            works = [self._send(piece, source) for source, piece in enumerate(slices)]
        return Transfer(self, works, target, whole, own)

    def exchange(self, whole: torch.Tensor, out: torch.Tensor, lengths: Sequence[int]) -> Transfer:
        """Give each rank its slice of ``whole``, ``lengths[r]`` elements for rank ``r``; ``out``
        gets this rank's slices of all ranks, one after the other; at a point where all have met.
        """
        target = torch.empty(out.shape, dtype=out.dtype, device="cpu") if self._staged else out
        given = as_bytes(whole.cpu() if self._staged else whole)
        itemsize = whole.dtype.itemsize
        taken = [lengths[self.rank] * itemsize] * self.world_size
        sent = [length * itemsize for length in lengths]
        if self._moving is not None:
            work = self._moving.transfers.alltoall_base(as_bytes(target), given, taken, sent)
        else:
            work = dist.all_to_all_single(
                as_bytes(target), given, taken, sent, group=self.group, async_op=True
            )
        return Transfer(self, [work], target, out, given)

    def _gather_level(self, whole: torch.Tensor, own: torch.Tensor) -> Any:
        if self._moving is not None:
            return self._moving.transfers._allgather_base(whole, own)
        return _gather_into(whole, own, group=self.group, async_op=True)

    def _send(self, piece: torch.Tensor, source: int) -> Any:
        """From rank ``source`` to all others."""
        if self._moving is not None:
            return self._moving.transfers.broadcast(piece, source)
        return dist.broadcast(piece, self._global_ranks[source], group=self.group, async_op=True)

    def leave(self, error: BaseException | None = None) -> None:
        """Take this rank out; with ``error`` the others are told why. Idempotent."""
        self.leave_training(error)
        self.saving.leave(error)

    def leave_training(self, error: BaseException | None) -> None:
        """As ``leave``, of all but saves: those in the background may still come through."""
        self.coordinator.leave(error)
        if self._moving is not None:
            self._moving.leave(error)

    def _name(self, kind: int, number: int) -> str:
        what = doing(kind) or _KINDS[kind]
        if doing(kind):
            return what
        steps, of = number // _NUMBERS, number % _NUMBERS + SMALL
        name = "" if kind == LOAD else f" {of}"
        if kind in (GATHER, REDUCE, VALUES, CHANGE):
            name = " small parameters" if of == SMALL else f" {self.names[of]}"
        return f"{what}{name} (steps taken in this block: {steps})"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a flat contiguous tensor: every backend can move these. Raises ``ValueError``
    for one whose values are not its bytes.
    """
    check_plain("a tensor to be sent", tensor)
    return tensor.view(torch.uint8)


_gather_into: Any = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)
"""The same under the names that it has in different releases of torch."""
