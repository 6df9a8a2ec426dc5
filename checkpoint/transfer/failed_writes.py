"""A write to a stream that failed: the end of it tells, unless that error is on its way."""

from __future__ import annotations

import errno
import sys
from dataclasses import dataclass, field

from checkpoint.sheltered import describe

_MOST_ERRORS = 100
"""That may have come of each other."""
_MARK = "_checkpoint_stream"
"""The attribute by which an error is known as that of a write to a stream."""


@dataclass(slots=True)
class FailedWrite:
    """For whoever goes on behind it: what the error was. That is not held, it has a mark: its
    address may be that of another error by then.
    """

    code: int = errno.ECANCELED
    what: str = ""
    """Of an interrupt that came before it was noted, nothing."""
    mark: object = field(default_factory=object)

    def come(self, error: BaseException) -> None:
        """This is it, or tells of it."""
        vars(error)[_MARK] = self.mark
        if not self.what:
            self.what = describe(error)
            self.code = (error.errno if isinstance(error, OSError) else None) or errno.ECANCELED

    def error(self, name: str) -> OSError:
        """For whoever goes on."""
        what = (
            "a write has failed, and nothing of the stream is kept; open it anew and write all of "
            f"it again: {self.what or 'it was interrupted'}"
        )
        error = OSError(self.code, what, name)
        vars(error)[_MARK] = self.mark
        return error

    def is_handled(self) -> bool:
        """Whether it is on its way, or being handled, or what came of it is."""
        error = sys.exception()
        for _ in range(_MOST_ERRORS):
            if error is None or self._is(error):
                break
            error = error.__context__
        return error is not None

    def _is(self, error: BaseException) -> bool:
        if not self.what:
            return not isinstance(error, Exception)
        return vars(error).get(_MARK) is self.mark
