"""Undoing: all of it, in reverse order, whatever entries raise and whenever Ctrl-C comes."""

import _thread
import gc
import signal
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest

from swap.interruptions import undo as module
from swap.interruptions.undo import Closing, Leave, Undo, close_gone
from tests.support.interrupts import interrupt, interrupt_at_instruction, interrupt_behind_call
from tests.support.proof import matrix


class Work:
    """Things that were done and are to be undone; ``left`` are those that are not yet."""

    def __init__(self, undo: Undo, count: int) -> None:
        self.left = list(range(count))
        self.undo = undo
        for number in self.left:
            undo.callback(self._undo_one, number)

    def _undo_one(self, number: int) -> None:
        if number in self.left:
            assert number == self.left[-1]
            self.left.remove(number)


def test_entries_are_called_once_in_reverse_order() -> None:
    called: list[int] = []
    with Undo() as undo:
        for number in range(3):
            undo.callback(called.append, number)
    undo.close()
    assert called == [2, 1, 0]


def test_interrupt_at_any_line_costs_no_entry() -> None:
    lines = interrupt(Work(Undo(), 3).undo.close, None).seen
    assert lines > 20
    for number in range(lines):
        work = Work(Undo(), 3)
        assert interrupt(work.undo.close, number).line
        work.undo.close()  # for an interrupt before its first step
        assert work.left == []


def _leave(*entries: Leave, error: BaseException | None = None) -> None:
    """A block with these entries, the first of which is called last."""
    with Undo() as undo:
        for entry in entries:
            undo.push(entry)
        if error is not None:
            raise error


def _failing(name: str) -> Leave:
    def fail(*_: object) -> None:
        raise OSError(name)

    return fail


def test_error_of_an_entry_is_told_to_those_after_it_and_raised() -> None:
    told: list[str] = []

    def listen(kind: object, error: BaseException | None, trace: object) -> None:
        told.append(str(error))

    with pytest.raises(OSError, match="no") as caught:
        _leave(listen, _failing("no"), listen, error=ValueError("of the block"))
    assert told == ["of the block", "no"]
    assert str(caught.value.__context__) == "of the block"


def test_errors_of_several_entries_are_chained() -> None:
    with pytest.raises(OSError, match="third") as caught:
        _leave(_failing("third"), _failing("second"), error=OSError("first"))
    second = caught.value.__context__
    assert second is not None
    assert [str(second), str(second.__context__)] == ["second", "first"]


@pytest.mark.parametrize("is_first", [True, False])
def test_interrupt_gives_way_to_an_error_that_an_entry_raised(is_first: bool) -> None:
    came: list[None] = []

    def come(*_: object) -> None:
        if not came:
            came.append(None)
            raise KeyboardInterrupt

    entries = (_failing("no"), come) if is_first else (come, _failing("no"))
    with pytest.raises(OSError, match="no") as caught:
        _leave(*entries)
    assert isinstance(caught.value.__context__, KeyboardInterrupt)


def test_interrupts_between_entries_that_come_again_and_again_cost_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, coming, run = Work(Undo(), 3), [KeyboardInterrupt()] * 5, Undo._run

    def run_and_be_interrupted(self: Undo, cause: BaseException | None) -> None:
        if coming:
            raise coming.pop()
        run(self, cause)

    monkeypatch.setattr(Undo, "_run", run_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        work.undo.close()
    assert work.left == []


def test_entry_that_ends_in_an_interrupt_each_time_is_given_up() -> None:
    calls: list[None] = []

    def interrupted(*_: object) -> None:
        calls.append(None)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _leave(lambda *_: calls.clear(), interrupted)
    assert calls == []


def test_manager_whose_entering_is_interrupted_is_left() -> None:
    left: list[None] = []

    class Manager:
        def __enter__(self) -> None:
            raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None:
            left.append(None)

    undo = Undo()
    with pytest.raises(KeyboardInterrupt):
        undo.enter_context(Manager())
    undo.close()
    assert left == [None]


def test_forgotten_entries_are_not_called() -> None:
    called: list[int] = []
    with Undo() as undo:
        undo.callback(called.append, 0)
        undo.forget()
    assert called == []


# Closing what nobody closed.


class Owner:
    pass


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was closed, where no others are left."""
    monkeypatch.setattr(module, "_left", set())
    return []


def _closing(number: int, closed: list[int]) -> Owner:
    owner = Owner()
    Closing(owner, lambda: closed.append(number))
    return owner


@pytest.mark.parametrize(
    ("interrupt_at", "end"),
    matrix(
        product([interrupt, interrupt_behind_call], [close_gone, module._close_all]),
        usual=[(interrupt_behind_call, close_gone)],
    ),
)
def test_interrupt_as_a_closing_is_made_keeps_no_other_from_being_closed(
    interrupt_at: Callable[..., Any], end: Callable[[], None], closed: list[int]
) -> None:
    lines = interrupt_at(lambda: _closing(0, closed), None).seen
    assert lines >= 5
    for number in range(lines):
        end()
        closed.clear()
        before = _closing(1, closed)
        interrupt_at(lambda: _closing(0, closed), number)
        after = _closing(2, closed)
        del before, after
        gc.collect()
        end()
        assert {1, 2} <= {*closed}
        assert closed.count(0) <= 1
        assert module._left == set()


@pytest.mark.parametrize("end", [close_gone, module._close_all])
def test_closing_that_fails_keeps_no_other_from_being_closed(
    end: Callable[[], None], closed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        if is_broken:
            raise OSError("cannot close")
        closed.append(9)

    is_broken = True
    monkeypatch.setattr(_thread, "start_new_thread", lambda *_: 0)  # that nobody else closes
    owners = [_closing(number, closed) for number in range(4)]
    owner = Owner()
    closing = Closing(owner, fail)
    owners += [_closing(number, closed) for number in range(4, 8)]
    assert not any(one.is_due for one in module._left)
    owners.clear()
    del owner
    with pytest.raises(OSError, match="cannot close"):
        end()
    assert sorted(closed) == [*range(8)]
    assert module._left == {closing}
    is_broken = False
    end()
    assert closed[-1] == 9
    assert module._left == set()


def test_what_a_handler_raises_in_an_entry_costs_none_of_it_and_is_raised() -> None:
    """As that of a DataLoader does when a worker dies: an error of any kind, and it comes once."""
    left, steps = [3, 2, 1], iter([None, RuntimeError("a worker died")])

    def undo_all() -> None:
        while left:
            if (error := next(steps, None)) is not None:
                raise error
            left.pop()

    with pytest.raises(RuntimeError, match="a worker died"):
        _leave(lambda *_: undo_all(), lambda *_: None)
    assert left == []


def test_entry_that_fails_is_called_once_more_and_its_first_error_raised() -> None:
    failures = [OSError(5, "a disk"), ValueError("second"), ValueError("first")]

    def fail(*_: object) -> None:
        raise failures.pop()

    with pytest.raises(ValueError, match="first"):
        _leave(fail)
    with pytest.raises(OSError, match="a disk"):
        _leave(fail)
    assert failures == []


class _Handler:
    """What programs install for a signal."""

    def raise_error(self, number: int, frame: object) -> None:
        raise RuntimeError("a worker died")

    def __call__(self, number: int, frame: object) -> None:
        raise RuntimeError("a worker died")


@pytest.mark.parametrize(
    "handler",
    [_Handler(), _Handler().raise_error, partial(_Handler.raise_error, _Handler())],
    ids=["object", "method", "partial"],
)
def test_handler_that_raises_again_and_again_costs_none_of_an_entry(
    handler: Callable[[int, object], None],
) -> None:
    """As that of a DataLoader does when all of its workers die."""
    left = list(range(20))

    def undo_all() -> None:
        while left:
            left.pop()
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(RuntimeError, match="a worker died"):
            _leave(lambda *_: undo_all())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert left == []


def test_error_of_the_call_itself_is_raised_and_what_a_handler_raised_before_is_behind_it() -> None:
    failures = [OSError(5, "a disk"), RuntimeError("a worker died")]

    def fail(*_: object) -> None:
        raise failures.pop()

    with pytest.raises(OSError, match="a disk") as caught:
        _leave(fail, error=ValueError("of the block"))
    handlers = caught.value.__context__
    assert handlers is not None
    assert [str(handlers), str(handlers.__context__)] == ["a worker died", "of the block"]


@pytest.mark.parametrize("kind", [ValueError, partial(OSError, 5)])
def test_interrupt_costs_no_error_that_an_entry_raises_once(
    kind: Callable[[str], Exception],
) -> None:
    for number in range(20):
        left, raised, undo = [kind("kept")], list[BaseException](), Undo()
        undo.push(partial(_raise_of, left))
        close = partial(_note, undo.close, raised)
        interrupt_at_instruction(close, number)
        close()  # for an interrupt before its first step, or behind its last
        assert any("kept" in str(told) for one in raised for told in (one, one.__context__))
        assert left == []


def _raise_of(left: list[Exception], *_: object) -> None:
    if left:
        raise left.pop()


def _note(action: Callable[[], object], raised: list[BaseException]) -> None:
    try:
        action()
    except BaseException as error:
        raised.append(error)
