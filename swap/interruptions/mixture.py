"""Values that are of no one moment, because what changed them was stopped, or because some were
lost before, and the refusal to go on with them.

Invariant: whoever replaces values, or state, says so before the first of them is changed
(``Mixture.changing``). Where that does not come to its end, whatever the reason, everything but
replacing all of it again is refused by ``Mixture.check``, until that has worked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_MAX_NAMES = 4
_REMEDY = (
    "load a checkpoint that has all of it (offloaded.load), or restore a snapshot; all else is "
    "refused until then"
)


class MixedStateError(RuntimeError):
    """Weights or optimizer state are in part from before a change that was stopped, and in part
    from after it, or weights were lost in an earlier block and not loaded since: there is nothing
    to train on, to save or to read. ``parameters`` are the names of those whose values or state
    that is.
    """

    def __init__(self, message: str, parameters: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.parameters = list(parameters)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.parameters)


@dataclass(frozen=True, slots=True)
class Scope:
    """What a change replaces: parameters by index."""

    values: frozenset[int] = frozenset()
    state: frozenset[int] = frozenset()

    @property
    def parameters(self) -> frozenset[int]:
        return self.values | self.state

    def covers(self, other: Scope) -> bool:
        return self.values >= other.values and self.state >= other.state


@dataclass(frozen=True, slots=True)
class _Stopped:
    """A change that did not come to its end."""

    scope: Scope
    why: str
    has_values: bool
    """Whether the values are still worth having as the block ends."""
    is_in_part: bool
    """Whether they may be in part from before the change and in part from after it."""
    cause: BaseException | None = None


class Change:
    """One that is under way. Nothing of it counts before ``begin``."""

    def __init__(self, mixture: Mixture, what: str) -> None:
        self.scope: Scope | None = None
        self.what = what
        self.before: tuple[_Stopped, ...] = ()
        self._mixture = mixture

    def begin(self, scope: Scope) -> None:
        """From now on ``scope`` is replaced. Raises as ``check_covered``. Can be called again."""
        self._mixture.check_covered(scope, self.what)
        if self.scope is None:
            self.before, self._mixture.stopped = self._mixture.stopped, ()
            self.scope = scope

    def undone(self) -> None:
        """Everything is again as it was when this began."""
        self._mixture.stopped, self.scope = self.before, None


class Mixture:
    """What was stopped of the changes to parameters with these ``names``."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.stopped: tuple[_Stopped, ...] = ()

    @property
    def is_left(self) -> bool:
        """Whether something was stopped, and nothing has replaced all of it since."""
        return bool(self.stopped)

    @property
    def without_values(self) -> frozenset[int]:
        """Parameters whose values are not worth having."""
        left = (one.scope.values for one in self.stopped if not one.has_values)
        return frozenset().union(*left)

    def check(self) -> None:
        """Raises ``MixedStateError`` where something was stopped."""
        if self.stopped:
            raise self._error(self.stopped[0]) from self.stopped[0].cause

    def check_covered(self, scope: Scope, what: str) -> None:
        """Raises ``MixedStateError`` where something was stopped that ``what``, which replaces
        ``scope``, leaves as it is.
        """
        for one in self.stopped:
            if not scope.covers(one.scope):
                left = one.scope.values - scope.values or one.scope.state - scope.state
                raise MixedStateError(
                    f"{what} leaves {self._listed(left)} as it is, and {one.why}; {_REMEDY}",
                    self._named(one.scope.parameters),
                )

    @contextmanager
    def changing(self, what: str) -> Iterator[Change]:
        """Inside, a change is made, which ``what`` names in errors. One that has begun and is ended
        by an exception or an interrupt is stopped.
        """
        change = Change(self, what)
        try:
            yield change
        except BaseException as failure:
            if change.scope is not None:
                why = f"{what} was stopped ({_told(failure)})"
                stopped = _Stopped(change.scope, why, has_values=False, is_in_part=True)
                self.stopped = (*change.before, stopped)
            raise

    def begin_without(self, parameters: Iterable[int], values: str) -> None:
        """These were lost before, and have ``values`` here, which are not of the model's moment."""
        scope = Scope(frozenset(parameters))
        if scope.values:
            names = self._listed(scope.values)
            why = f"an earlier block lost the values of {names}, and here it has {values}"
            lost = _Stopped(scope, why, has_values=False, is_in_part=False)
            self.stopped = (*self.stopped, lost)

    def stop_step(self, failure: BaseException, parameters: Iterable[int]) -> MixedStateError:
        """An update was stopped by ``failure``, and cannot be repeated: the ``parameters`` are as
        before the step or in the midst of it. Returns the error that says so.
        """
        scope = Scope(frozenset(parameters), frozenset(range(len(self._names))))
        left = "options of the optimizer may be as before it"
        if scope.values:
            left = f"{self._listed(scope.values)} may be as before it or in the midst of it"
        why = (
            f"a step was stopped ({_told(failure)}), which cannot be repeated: {left}, and all "
            "else that it updates is as after it"
        )
        stopped = _Stopped(scope, why, has_values=True, is_in_part=False, cause=failure)
        self.stopped = (*self.stopped, stopped)
        error = self._error(stopped)
        error.__cause__ = failure
        return error

    def _error(self, stopped: _Stopped) -> MixedStateError:
        parameters = stopped.scope.values if stopped.has_values else stopped.scope.parameters
        text = stopped.why
        if stopped.is_in_part:
            text += f", and {self._listed(parameters)} may be in part as before and in part not"
        return MixedStateError(f"{text}; {_REMEDY}", self._named(parameters))

    def _named(self, parameters: Iterable[int]) -> list[str]:
        return [self._names[index] for index in sorted(parameters)]

    def _listed(self, parameters: Iterable[int]) -> str:
        names = self._named(parameters)
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        return ", ".join(names[:_MAX_NAMES]) + more


def _told(failure: BaseException) -> str:
    text = str(failure)
    return type(failure).__name__ + (f": {text}" if text else "")
