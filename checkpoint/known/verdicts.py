"""What is found of a checkpoint: whether it can be loaded, and which errors say that it cannot."""

from __future__ import annotations

import enum
import errno
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aio.errors import without_frames
from checkpoint.errors import CorruptCheckpointError, IncompleteCheckpointError
from checkpoint.format.rules import is_data_file_name
from checkpoint.outside import entrance, raised_as_they_are

logger = logging.getLogger(__name__)

_OF_A_FILE = frozenset(
    {
        errno.EACCES,
        errno.EBADE,
        errno.EBADMSG,
        errno.EILSEQ,
        errno.EIO,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENODATA,
        errno.ENODEV,
        errno.ENOLINK,
        errno.ENOTCONN,
        errno.ENOTDIR,
        errno.ENXIO,
        errno.EPERM,
        errno.EREMOTEIO,
        errno.ESTALE,
        errno.ETIME,
        errno.ETIMEDOUT,
        errno.EUCLEAN,
    }
)
"""With what Linux says of disks where direct I/O reads them: EILSEQ is a check within the drive.
Others, such as too many open files, are as likely with any checkpoint."""


class Verdict(enum.StrEnum):
    """What is found of a step: the weakest of what the ranks find counts."""

    WHOLE = "whole"
    ABSENT = "absent"
    """Removed since it was listed; or a save that runs or was killed, which is no damage."""
    DAMAGED = "damaged"
    """Or it cannot be read, which is no better here."""


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """What `Manager.load` loaded. `passed_over` are steps that were saved later and are damaged or
    cannot be read.
    """

    step: int
    passed_over: tuple[int, ...]


def told(root: Path, step: int, found: Sequence[int]) -> LoadedStep:
    """What was loaded, in the log as well; `found` are steps that were passed over. Of these the
    loaded one is none: it was saved anew since.
    """
    passed_over = tuple(one for one in found if one != step)
    if passed_over:
        logger.warning(
            "%s: step %d was loaded; saved later, damaged and passed over: %s",
            root,
            step,
            ", ".join(map(str, passed_over)),
        )
    else:
        logger.info("%s: step %d was loaded", root, step)
    return LoadedStep(step, passed_over)


def weakest(found: Sequence[str]) -> Verdict:
    """What counts of what the ranks found, by their values."""
    return next((v for v in (Verdict.DAMAGED, Verdict.ABSENT) if v in found), Verdict.WHOLE)


def verdict_of(path: Path, look: Callable[[], object]) -> Verdict:
    """What becomes of a look at a step. Raises what is wrong with more than that step, and what is
    wrong with something that is loaded into.
    """
    with raised_as_they_are():
        return _verdict_of(path, look)


def _verdict_of(path: Path, look: Callable[[], object]) -> Verdict:
    handled = sys.exception()
    try:
        look()
    except (FileNotFoundError, IncompleteCheckpointError):
        return Verdict.ABSENT
    except CorruptCheckpointError as error:
        pass_over(path, error, handled)
        return Verdict.DAMAGED
    except OSError as error:
        if not is_unreadable(path, error):
            raise
        pass_over(path, error, handled)
        return Verdict.DAMAGED
    return Verdict.WHOLE


@entrance
def failure_of(path: Path, look: Callable[[], object]) -> list[Exception]:
    """The error of a look at a checkpoint that says that it is damaged or cannot be read, if there
    is one. Raises all others.
    """
    try:
        look()
    except CorruptCheckpointError as error:
        return [error]
    except OSError as error:
        if not is_unreadable(path, error):
            raise
        return [error]
    return []


def is_unreadable(checkpoint: Path, error: OSError) -> bool:
    """Whether an error says that this checkpoint cannot be read, and others perhaps can.

    It names a file of the checkpoint then. What is loaded into raises no such error, see `outside`.
    """
    if error.errno not in _OF_A_FILE or not isinstance(error.filename, str | bytes):
        return False
    file = Path(os.fsdecode(error.filename))
    homes = {checkpoint, Path(os.path.realpath(checkpoint))}
    return bool(homes & {file, *file.parents}) or is_data_file_name(file.name)


def pass_over(path: Path, error: Exception, handled: BaseException | None) -> None:
    """Says why a step is not loaded. The error holds nothing then: what refers to itself through
    what it came through would keep what is loaded in its place. What the caller `handled` before,
    the failure of a run as a rule, keeps its traceback.
    """
    logger.warning("%s is passed over: %s", path, error)
    without_frames(error, handled)


@contextmanager
def warned(path: Path) -> Iterator[None]:
    """Of what is in the way of removing a checkpoint."""
    handled = sys.exception()
    try:
        yield
    except (BlockingIOError, FileNotFoundError):  # it is being saved; or somebody removed it
        pass
    except CorruptCheckpointError as error:
        pass_over(path, error, handled)
    except OSError as error:
        logger.warning("%s: cannot be removed: %s", path, error)
