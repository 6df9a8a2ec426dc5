"""Values that could not be given back as a block ended: the error that keeps them for a retry, and
their parameters, which are on the meta device. A model that has these is not computed with.

No operator takes such a weight, see ``placeholders.lost``. A module that has one refuses its call
before anything is computed, also in another process, where such a weight arrives as a plain one of
the meta device: on the CPU torch refuses not every use of those.
"""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.utils.hooks import RemovableHandle

from aio import AioError
from infinity.parameters.offloaded.handlers import check_not_amid
from infinity.parameters.offloaded.placeholders import is_placeholder, refusal_of_lost, refuse
from swap.interruptions.forks import check_process

_MAX_NAMES = 8


class RestoreError(AioError):
    """Parameters could not be given their trained values as the block ended; all others have them.

    ``parameters`` are their names. They are on the meta device, and what is computed with them or
    with modules that have them is refused, or, where it was the last step that could not be
    finished, they have their values from before it. What they should have is still in the swap
    files (``folders``) for as long as this exception is kept: ``retry`` reads it when the disk
    works again.
    """

    def __init__(
        self,
        message: str,
        failure: BaseException,
        parameters: Sequence[str],
        folders: Sequence[str],
        again: Callable[[], None],
    ) -> None:
        code = failure.errno if isinstance(failure, OSError) else None
        filename = failure.filename if isinstance(failure, OSError) else None
        super().__init__(message, errno=code or errno.EIO, filename=filename)
        self.parameters = list(parameters)
        self.folders = list(folders)
        self._again = again
        self._process = os.getpid()
        self._lost: Callable[[], Iterable[nn.Parameter]] = tuple

    def __reduce__(self) -> tuple[object, ...]:
        fields = (self.errno, self.filename, self.parameters, self.folders)
        return _elsewhere, (self.message, *fields)

    def retry(self) -> None:
        """Finish the last step and read what is missing into the model; the swap files go then.

        Raises ``RestoreError`` for what still cannot be read, and ``RuntimeError`` where the model
        has no place for it: inside another block, or where another shape is now. The swap files
        stay then, too. Does nothing once it has worked. Waits for one on another thread, and does
        what that leaves.
        """
        check_process(self._process, "the RestoreError")
        check_not_amid("retry()")
        self._again()


def _elsewhere(
    message: str, code: int, filename: str | None, parameters: list[str], folders: list[str]
) -> RestoreError:
    """A copy in another process, which has neither the model nor the swap files."""
    return RestoreError(message, OSError(code, "", filename), parameters, folders, _refuse_retry)


def _refuse_retry() -> None:
    raise RuntimeError("the model and its swap files are with the process that raised the error")


alive: WeakSet[RestoreError] = WeakSet()
"""Those that can be retried in this process."""


def check_not_held(model: nn.Module) -> None:
    """Raises ``ValueError`` naming parameters whose trained values an error that is alive can still
    give back: a block would begin without them.
    """
    if not _held(model):
        return
    gc.collect()  # errors that nobody has any more, but for their own traceback
    if names := _held(model):
        raise ValueError(
            f"{listed(names)} would begin the block without the trained values, which a "
            "RestoreError of an earlier block still has in its swap files: call its retry() first, "
            "or let go of that error (del) to go on without them"
        )


def _held(model: nn.Module) -> list[str]:
    held = {id(parameter) for error in alive for parameter in error._lost()}
    return [name for name, p in model.named_parameters() if id(p) in held] if held else []


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


class _Refusal:
    """A hook before ``forward``, for a module that has these parameters itself or in its children:
    (module, name there, name in the model).

    It refuses while they are on the meta device. It is copied and pickled with the module.
    """

    def __init__(self, places: list[tuple[nn.Module, str, str]]) -> None:
        self._places = places

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        for owner, own, name in self._places:
            parameter = owner._parameters.get(own)
            if parameter is not None and parameter.is_meta:
                if is_placeholder(parameter):
                    refuse(parameter)
                raise RuntimeError(refusal_of_lost(name))


def refuse_calls(model: nn.Module, lost: Collection[nn.Parameter]) -> list[RemovableHandle]:
    """Let a call of what has parameters of ``lost`` raise ``RuntimeError`` that names one, while it
    is on the meta device; removing the handles ends that.
    """
    keys = {id(parameter) for parameter in lost}
    names: Mapping[int, str] = {id(p): name for name, p in model.named_parameters()}
    handles = []
    for module in model.modules():
        places = [
            (owner, own, names[id(parameter)])
            for owner in module.modules()
            for own, parameter in owner._parameters.items()
            if id(parameter) in keys
        ]
        if places:
            handles.append(module.register_forward_pre_hook(_Refusal(places), prepend=True))
    return handles
