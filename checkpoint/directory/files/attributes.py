"""Owner, group and permissions that a new file takes over from those that it is to replace.

They are given while the file is private. What cannot be given fails nothing and makes the file more
private: a file without the group of the old one gives nobody what the old one did not.

Invariant: who may not read an old file does not read the new one, but for the one who writes it.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aio.process.absence import status_of

logger = logging.getLogger(__name__)

PRIVATE = 0o600
"""Of a file that is to take over what another one has, until it does."""


@dataclass(frozen=True, slots=True)
class Attributes:
    """Of a file. None for a user or a group that it shall not be given."""

    user: int | None
    group: int | None
    mode: int
    """Permission bits alone."""

    @classmethod
    def of(cls, status: os.stat_result) -> Attributes:
        """What a file has."""
        return cls(status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode) & 0o777)

    def with_other_owner(self, *, user: bool, group: bool) -> int:
        """The permissions that give nobody what these do not, where the file has another user or
        another group: who was the user may be of the group or of the others then, and who was of
        the group of the others.
        """
        owner, members, others = self.mode >> 6, self.mode >> 3 & 7, self.mode & 7
        if group:
            members = others = members & others
        if user:
            members, others = members & owner, others & owner
        return owner << 6 | members << 3 | others


_told: dict[Attributes, None] = {}
_MOST_TOLD = 1000


def attributes_at(path: Path) -> Attributes | None:
    """Of the file at a path; None where there is none. Raises OSError."""
    status = status_of(path)
    return None if status is None else Attributes.of(status)


def shared_attributes(replaced: Sequence[Attributes]) -> Attributes | None:
    """For a file that has something of each of these: what nobody has who lacks it of one of them.
    None for none.
    """
    if not replaced:
        return None
    users, groups = {one.user for one in replaced}, {one.group for one in replaced}
    mode = 0o777
    for one in replaced:
        mode &= one.with_other_owner(user=len(users) > 1, group=len(groups) > 1)
    user = users.pop() if len(users) == 1 else None
    return Attributes(user, groups.pop() if len(groups) == 1 else None, mode)


def give_attributes(descriptor: int, replaced: Attributes | None, path: Path) -> None:
    """Gives them to a new file of this process, which is `PRIVATE`, as far as that may be. Where
    its permissions are others than they were, a warning says so, once for each kind.
    """
    if replaced is None:
        return
    # Not compared with what it has: numbers that a user namespace lacks are all shown as one.
    has_group = replaced.group is not None and _may(os.fchown, descriptor, -1, replaced.group)
    # Before the owner changes, after which the process may not be allowed to.
    mode = replaced.with_other_owner(user=True, group=not has_group)
    has_mode = _may(os.fchmod, descriptor, mode)
    has_user = replaced.user is not None and _may(os.fchown, descriptor, replaced.user, -1)
    wanted = replaced.with_other_owner(user=not has_user, group=not has_group)
    if wanted != mode and _may(os.fchmod, descriptor, wanted):
        mode, has_mode = wanted, True
    mode = mode if has_mode else PRIVATE
    if mode == replaced.mode:
        return
    if replaced not in _told:
        _told[replaced] = None
        for oldest in list(_told)[:-_MOST_TOLD]:  # a copy: others are told on other threads
            _told.pop(oldest, None)
        logger.warning(
            "%s: a new file has permissions %04o, and what it replaces had %04o: this process "
            "may not give it %s; set them with chmod and chgrp, or save as the owner or as one "
            "of the group",
            path.parent,  # its own name may not be the last
            mode,
            replaced.mode,
            "permissions" if not has_mode else "its group" if not has_group else "its owner",
        )


def _may(change: Callable[..., None], *arguments: int) -> bool:
    """Whether a change of attributes could be made. Whatever is in the way (permission, a number
    that is none here, a file system that has no owners) is in the way of nothing else.
    """
    try:
        change(*arguments)
    except OSError:
        return False
    return True
