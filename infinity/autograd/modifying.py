"""Real tensors in parameters while a program asks for them, and what becomes of its changes."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from functools import partial
from typing import Any

import torch
from torch import nn

from infinity.autograd.kept_views import KeptViews
from infinity.autograd.residency import ModuleResidency
from infinity.autograd.versions import Versions
from infinity.background import BackgroundSaves
from infinity.parameters.offloaded.changes import LentMemories, LentMemory
from infinity.parameters.offloaded.handlers import check_not_amid, is_amid, runs_program
from infinity.parameters.offloaded.modes import own_modes
from infinity.parameters.records import Record
from infinity.ranks.context import RankContext
from infinity.tiling.weight import TiledWeight
from infinity.tiling.wholes import note_piece
from swap.interruptions.apart import run_apart
from swap.interruptions.forks import note
from swap.tiered import TieredState

_PATIENCE_SECONDS, _LOOK_SECONDS = 10.0, 0.001
"""Of who waits for passes, and how often it looks: these tell nobody of their end, so that a pass
beside which nobody waits pays nothing.
"""
Parameters = nn.Module | Iterable[torch.Tensor] | torch.Tensor | None


class Loans:
    """Parameters that hold whole weights of their own, which are the program's to change.

    Who asks for a parameter that is lent already shares its tensor. It goes back when the last who
    asked for it is done; its values are taken as each thread's outermost who modifies them ends.
    """

    def __init__(
        self,
        records: Sequence[Record],
        state: TieredState,
        residency: ModuleResidency,
        rank_context: RankContext,
        versions: Versions,
        views: KeptViews,
    ) -> None:
        self._records, self._state = records, state
        self._residency = residency
        self._rank_context = rank_context
        self._versions = versions
        self._views = views
        self._lent: dict[object, tuple[list[int], int | None]] = {}
        """Who asked, in that order, for what, and the thread that is to modify it, if one is: the
        only table, for an interrupt would leave two of them apart.
        """
        self._left: dict[object, None] = {}
        """Who is done, and could not wait for the parameters to go back: see ``give_back``."""
        self.memory = LentMemories()
        self._kept: list[weakref.finalize[..., Any]] = []
        """Looks for changes in memory that programs kept a part of, maybe, when it went back."""
        self._handing = threading.RLock()
        self._waiting: set[int] = set()
        """Threads that wait for passes; what an interrupt leaves here goes with the next wait."""
        self._is_over = False
        state.refusals.add(self._refuse_changes)  # by a thread that looked before one here asked
        note(self)

    def lend(
        self, chosen: Callable[[], Iterable[Record]], modify: bool, saves: BackgroundSaves
    ) -> AbstractContextManager[None]:
        """Real tensors in the parameters that ``chosen`` gives, once it is entered, inside. Where
        its end takes values back, ``saves`` have read what was there; the end of the offload block,
        on another thread, waits for it.

        Raises ``RuntimeError`` naming what else was changed inside; nothing is taken back then.
        """
        return _Loan(self, chosen, modify, saves)

    def begin(self, loan: object, chosen: Iterable[Record], modify: bool) -> None:
        """``loan`` is lent the ``chosen``."""
        self.take_in_left()
        indices = sorted({record.index for record in chosen})
        self._lent[loan] = indices, threading.get_ident() if modify else None
        self._state.flush()  # only now: a step that another thread began before is seen here
        self.wait_for_passes()
        self._hand_out(indices)

    def take(self, loan: object, *, is_late: bool) -> None:
        """Have the values of ``loan`` if it is there to modify them, but for those that one around
        it still has; of one that ``is_late`` none, for the end of the offload block goes on beside
        it.
        """
        self.take_in_left()
        indices, thread = self._lent[loan]
        self._check_open(is_late=is_late)
        self._versions.check()
        self._residency.check_faces(indices)
        if thread is not None:
            self._versions.spread_changes(indices)
            self._views.find(indices)
            self._views.expire(indices)
            self._check_moved(indices)
            self._keep(self._not_around(loan))

    def _not_around(self, loan: object) -> list[int]:
        """What nobody of the same thread who asked before ``loan`` is to modify still, and loses
        should it fail. Others may fail as well, and have no say in what ``loan`` has changed.
        """
        indices, thread = self._lent[loan]
        lent = [*self._lent.items()]
        before = lent[: [other for other, _ in lent].index(loan)]
        around = {i for _, (those, theirs) in before if theirs == thread for i in those}
        return [index for index in indices if index not in around]

    def check_none(self, what: str) -> None:
        """Raises ``RuntimeError`` if a parameter is lent: ``what`` would change it at home."""
        self.take_in_left()
        self._refuse(self._residency.kept_out, what, "would not see its values, nor it those")

    def check_unmodified(self, what: str) -> None:
        """Raises ``RuntimeError`` if a parameter is lent to be modified: ``what`` reads it at
        home.
        """
        self.take_in_left()
        self._refuse(self.modified(), what, "would write the values from before")

    def _refuse_changes(self) -> None:
        lent = self._residency.kept_out | self._asked()
        self._refuse(lent, "a step or a load", "would not see its values, nor it those")

    def wait_for_passes(self) -> None:
        """Until what forward passes (and operations) of other threads are in the midst of, which
        have parameters that are about to change places, is over; no longer than a while, for they
        may wait for this thread. Those that wait here as well are in the midst of nothing else.
        """
        until = time.monotonic() + _PATIENCE_SECONDS
        thread = threading.get_ident()
        try:
            self._waiting.add(thread)
            others = self._residency.working(elsewhere=True, but=[*self._waiting])
            while others and time.monotonic() < until:
                time.sleep(_LOOK_SECONDS)
                others = others & self._residency.working(elsewhere=True, but=[*self._waiting])
        finally:
            self._waiting.discard(thread)

    def _refuse(self, indices: Collection[int], what: str, why: str) -> None:
        if indices:
            raise RuntimeError(
                f"{what} inside gathered(), where {self._listed(indices)} is the program's to "
                f"change, {why}; leave the gathered block first"
            )

    def end(self, kind: type[BaseException] | None, *_: object) -> None:
        """Everything goes back as the model is offloaded no longer, for an ``ExitStack``.

        Raises ``RuntimeError`` if something was still lent, unless an error is on its way.
        """
        self.take_in_left()
        while self._kept:  # what is written later is written into memory of the program's own
            self._kept[-1]()
            self._kept.pop()
        lent = sorted(self._residency.kept_out)
        self._is_over = True
        self._versions.note(lent)  # a save looks for changes of what is not lent
        self._residency.let_in(lent)
        self._versions.note(lent)
        self._state.refusals.remove(self._refuse_changes)
        if lent and kind is None:
            raise RuntimeError(
                f"the offload block ended inside gathered() of {self._listed(lent)}, and what was "
                "changed there is lost; leave the gathered block first"
            )

    @own_modes  # or changes would not be counted
    def _hand_out(self, indices: Sequence[int]) -> None:
        self._residency.reset()
        with self._handing:  # another thread may have asked for the same, and begun with it
            for piece in self._pieces(i for i in indices if not self._residency.is_gathered([i])):
                weights = map(self._rank_context.weight_of, piece)  # one at a time
                lent = LentMemory.of(weights, sum(record.numel for record in piece))
                for record, (values, memory) in zip(piece, lent, strict=True):
                    self.memory.lies(record.index, memory)
                    self._residency.keep_out(record.index, values)
                note_piece([record.parameter for record in piece])

    def _pieces(self, indices: Iterable[int]) -> Iterable[Sequence[Record]]:
        """Those that are tiles of one weight together: a program may use it as one, and has views
        of its tiles by then, maybe.
        """
        pieces: dict[object, list[Record]] = {}
        for index in indices:
            whole = vars(self._records[index].parameter).get("tile_of", index)
            pieces.setdefault(whole, []).append(self._records[index])
        return pieces.values()

    def _keep(self, indices: Sequence[int]) -> None:
        """What was changed, of all of them or, where an interrupt comes before, of none. Ranks meet
        for that, on the thread that trains: an interrupt may come between two of them there.
        """

        def keep() -> None:
            with self._state.changing:  # or a save could begin with what only some of them are
                for piece in self._pieces(indices):
                    own_modes(self._rank_context.write_back)(piece)

        if self._rank_context.world_size == 1:
            run_apart(keep, "infinity-gathered")
        else:
            keep()

    def give_back(self, loan: object) -> None:
        """``loan`` is over. Idempotent; an interrupt comes before or after.

        What is dropped may be ended by the garbage collector, in the midst of a hook that has a
        lock which the parameters need to go back. They do so as the library is entered next.
        """
        if loan in self._lent:
            self._left[loan] = None
            if not is_amid(_ENDING):
                self.take_in_left()

    def take_in_left(self) -> None:
        """Parameters go back of which nobody else could wait for that."""
        for loan in [*self._left]:
            run_apart(partial(self._take_in, loan), "infinity-gathered")
            self._left.pop(loan, None)

    def _take_in(self, loan: object) -> None:
        with self._handing:  # who asks meanwhile shares what stays lent, or is lent it anew
            indices, _ = self._lent.pop(loan, ((), None))
            indices = sorted({*indices} - self._asked())
            self._let_in(indices)
            memories = self.memory.pop(indices)
        for index, memory in memories:
            look = None if self._is_over else memory.given_back(index, self)
            if look is not None:
                self._kept = [*(kept for kept in self._kept if kept.alive), look]

    def _let_in(self, indices: Sequence[int]) -> None:
        if not self._is_over:
            self._versions.note(indices)  # a save looks for changes of what is not lent
            try:
                self._residency.let_in(indices)
            finally:
                self._versions.note(indices)

    def after_fork(self) -> None:
        self._handing = threading.RLock()  # another thread may have had it

    def end_forward(self) -> None:
        """The outermost forward of a thread has ended."""
        self._views.settle()

    def changes_told(self, index: int) -> int:
        return self._versions.changes_told(index)

    def changed_copy(self, index: int, told: int) -> None:
        """See ``ChangeOwner``."""
        if not self._is_over:
            self._versions.changed_copy(index, told)

    def _check_moved(self, indices: Sequence[int]) -> None:
        at = {index: self._records[index].parameter.data_ptr() for index in indices}
        if lost := [i for i, address in at.items() if self.memory.is_written_late(i, address)]:
            raise RuntimeError(
                f"{self._listed(lost)} was written by a view of before its weight was put "
                "together, which was lent tile by tile; ask gathered() for the whole around that"
            )

    def _asked(self) -> set[int]:
        return {index for indices, _ in [*self._lent.values()] for index in indices}

    def modified(self) -> set[int]:
        """What is lent to be changed: whatever is made of its values at home is of old ones."""
        lent = [*self._lent.values()]
        return {i for indices, thread in lent if thread is not None for i in indices}

    def _check_open(self, *, is_late: bool) -> None:
        if self._is_over or is_late:
            raise RuntimeError(
                "the offload block ended inside gathered(), and what was changed there is lost; "
                "leave the gathered block first"
            )

    def _listed(self, indices: Collection[int]) -> str:
        more = f" (and {len(indices) - 1} more)" if len(indices) > 1 else ""
        return self._records[min(indices)].name + more


class _Loan(ContextDecorator, AbstractContextManager[None]):
    """Parameters that are lent from when it is entered until it is left. No generator: an interrupt
    as that hands over would leave them lent for as long as its error is kept.
    """

    _loan: object = None

    def __init__(
        self,
        loans: Loans,
        chosen: Callable[[], Iterable[Record]],
        modify: bool,
        saves: BackgroundSaves,
    ) -> None:
        self._loans, self._chosen, self._modify, self._saves = loans, chosen, modify, saves
        self._loan, self._is_entered = object(), False

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._loan is not None and not is_finalizing():  # None: an interrupt came as it was made
            self._loans.give_back(self._loan)  # should one have come as __exit__ began

    def _recreate_cm(self) -> _Loan:
        """As a decorator each call has one of its own."""
        return _Loan(self._loans, self._chosen, self._modify, self._saves)

    def __enter__(self) -> None:
        check_not_amid("gathered()")
        if self._is_entered:
            raise RuntimeError(
                "this gathered block is entered already, and would end with the first that ends; "
                "call gathered() again for one within another"
            )
        chosen = self._chosen()
        self._is_entered = True
        try:
            self._loans.begin(self._loan, chosen, self._modify)
        except BaseException:
            self._end()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._saves.before_end(partial(self._leave, kind))
        finally:
            self._end()

    def _leave(self, kind: type[BaseException] | None) -> None:
        is_late = self._saves.is_over  # if not, the end of the block waits for this
        try:
            if not self._is_entered:
                raise RuntimeError("this gathered block is not entered, or was left before")
            self._loans.wait_for_passes()
            if kind is None:
                check_not_amid("the end of gathered()", _ENDING)
                self._saves.wait_read()
                self._loans.take(self._loan, is_late=is_late)
        finally:
            self._end()

    def _end(self) -> None:
        try:
            self._loans.give_back(self._loan)
        finally:
            self._loans.give_back(self._loan)  # should an interrupt have kept it from beginning
            self._is_entered = False


_ENDING = frozenset(
    function.__code__
    for function in (
        *(_Loan.__del__, _Loan.__enter__, _Loan.__exit__, _Loan._leave, _Loan._end),
        *(BackgroundSaves.before_end, Loans.give_back),
    )
)


@runs_program
def asked(params: Parameters) -> Parameters:
    """What a generator gives, which may ask the handle for something, and is there once."""
    is_listed = isinstance(params, torch.Tensor | nn.Module | str | Mapping | Sequence)
    return list(params) if isinstance(params, Iterable) and not is_listed else params


def records_of(
    params: Parameters, records: Sequence[Record], index_of: Callable[[torch.Tensor], int]
) -> Sequence[Record]:
    """What ``params`` means: a module, a parameter, several, or None for all. Raises ``TypeError``
    for what is none of these.
    """
    if params is None:
        return records
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, torch.Tensor):
        params = [params]
    elif isinstance(params, str | Mapping) or not isinstance(params, Iterable):
        raise TypeError(
            f"params is a {type(params).__name__}; give a module, a parameter, a list of "
            "parameters, or None for all"
        )
    tiled = [p.tiles if isinstance(p, TiledWeight) else [p] for p in params]
    return [records[index_of(parameter)] for tiles in tiled for parameter in tiles]
