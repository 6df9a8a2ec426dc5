"""Errors of what a caller gives to be loaded into, which say nothing about a checkpoint.

A byte sink may raise what a checkpoint does that is gone or damaged: FileNotFoundError of a file of
its own, CorruptCheckpointError of another checkpoint. So its errors come past those who ask what is
wrong with this one as no error that they know, and are raised as what they are behind them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _OutsideError(Exception):
    """On its way."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__} of what is loaded into")
        self._error = [error]

    def taken(self) -> Exception:
        """The error, to which this leads no more: the other way there is one, by the frames that it
        comes through, and both would be kept until the collector runs.
        """
        self.__cause__ = self.__context__ = None
        return self._error.pop()


@contextmanager
def outside() -> Iterator[None]:
    """Around code of the caller."""
    try:
        yield
    except _OutsideError:
        raise
    except Exception as error:
        raise _OutsideError(error) from error


def carrying(call: Callable[P, T]) -> Callable[P, T]:
    """A method of the caller's, called as with `outside`."""

    def carried(*args: P.args, **named: P.kwargs) -> T:
        try:
            return call(*args, **named)
        except _OutsideError:
            raise
        except Exception as error:
            raise _OutsideError(error) from error

    return carried


@contextmanager
def raised_as_they_are() -> Iterator[None]:
    """Around what asks no more what an error says of a checkpoint."""
    found: list[Exception] = []
    try:
        yield
    except _OutsideError as outer:
        found.append(outer.taken())
    if found:
        error = found.pop()
        came_from = error.__context__
        try:
            raise error
        finally:
            error.__context__ = came_from  # and not what brought it here
            del error, came_from


def entrance(call: Callable[P, T]) -> Callable[P, T]:
    """A function that raises errors of the caller's own objects as they are."""

    @wraps(call)
    def entered(*args: P.args, **named: P.kwargs) -> T:
        with raised_as_they_are():
            return call(*args, **named)

    return entered


def within(call: Callable[P, T]) -> Callable[P, T]:
    """What is behind an `entrance`, for callers that tell such errors from others."""
    behind: Callable[P, T] = inspect.unwrap(call)
    return behind
