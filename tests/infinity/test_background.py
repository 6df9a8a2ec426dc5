"""What is known of background saves, whoever begins them, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infinity.background import BackgroundSaves


class _Save:
    """A ``PendingSave``; something happens as it is compared with others."""

    is_unraised = is_untold = False

    def __init__(self, *, is_done: bool, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._is_done, self._meanwhile = is_done, meanwhile
        self.was_waited_for = False

    def __eq__(self, other: object) -> bool:
        self._meanwhile()
        return self is other

    __hash__ = object.__hash__

    def done(self) -> bool:
        return self._is_done

    def wait_staged(self) -> None:
        self.was_waited_for = True


def test_a_save_that_begins_as_another_does_is_waited_for() -> None:
    """On another thread, or in a handler: a step behind it would change what it is reading."""
    saves: Any = BackgroundSaves()
    others = iter([_Save(is_done=False)])
    begun: list[_Save] = []

    def meanwhile() -> None:
        for one in others:
            begun.append(one)
            saves.add(one)

    for save in (
        _Save(is_done=False, meanwhile=meanwhile),
        _Save(is_done=True, meanwhile=meanwhile),
        _Save(is_done=False),
    ):
        begun.append(save)
        saves.add(save)
    meanwhile()
    saves.wait_read()
    assert [save.was_waited_for for save in begun].count(False) == 1  # that was done
