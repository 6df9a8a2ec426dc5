"""What is wrong with a checkpoint on disk, as exceptions that name file, tensor and extent."""

from __future__ import annotations

from pathlib import Path

_MOST_SHOWN = 200


class CorruptCheckpointError(ValueError):
    """A checkpoint exists and cannot be trusted: its manifest or its data is not what was saved.

    `path` is the file at fault, `tensor` the leaf it would have given, `offset` and `nbytes` the
    extent of the file; each is None where the fault has no such place.
    """

    def __init__(
        self,
        what: str,
        *,
        path: str | Path | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        nbytes: int | None = None,
    ) -> None:
        self.what = what
        self.path = None if path is None else str(path)
        self.tensor = tensor
        self.offset = offset
        self.nbytes = nbytes
        super().__init__(_place(self.path, tensor, offset, nbytes) + what)

    def in_file(self, path: str | Path | None) -> CorruptCheckpointError:
        """The same fault, said to be in this file unless it names one already."""
        if self.path is not None or path is None:
            return self
        return CorruptCheckpointError(
            self.what, path=path, tensor=self.tensor, offset=self.offset, nbytes=self.nbytes
        )


class IncompleteCheckpointError(ValueError):
    """A directory is there and holds no manifest: the save that made it never finished."""


class ChangedTensorError(RuntimeError):
    """A tensor was changed, or given other memory, while a save read it. `tensor` is its name.

    Nothing was published: the checkpoint before it is what it was. `remedy` is what to do instead,
    where that is more than to wait.
    """

    def __init__(self, tensor: str, remedy: str = "") -> None:
        self.tensor, self.remedy = tensor, remedy
        instead = "change it when the save has read it, or save a copy (`tensor.clone()`)"
        super().__init__(
            f"tensor {_short(tensor)!r} was changed while it was saved, so nothing was; "
            f"{remedy or instead}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are made anew of their text, which the name is not.
        return type(self), (self.tensor, self.remedy)


class RankFailedError(RuntimeError):
    """Another rank failed, is gone, or does something else. `rank` is which, where that is known.

    The message says what failed first.
    """

    def __init__(self, what: str, *, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(what)


def _place(path: str | None, tensor: str | None, offset: int | None, nbytes: int | None) -> str:
    parts = []
    if tensor is not None:
        parts.append(f"tensor {_short(tensor)!r}")
    if offset is not None:
        extent = f"at offset {offset}" if nbytes is None else f"{nbytes} bytes at offset {offset}"
        parts.append(extent + (f" of {path}" if path is not None else ""))
    elif path is not None:
        parts.append(path)
    return ", ".join(parts) + ": " if parts else ""


def _short(text: str) -> str:
    """A hostile name may be megabytes long; an error message may not."""
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."
