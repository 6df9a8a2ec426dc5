"""One descriptor and the object that owns it."""

import os


class Descriptor:
    """An open descriptor, closed once: by `close`, on leaving a `with`, or with its last reference.

    The number is given up before close(2) is called. An interrupt or an error in there may cost the
    descriptor, but never closes a second time what may be another thread's file by then.

    Raises what os.open raises.
    """

    def __init__(
        self, path: str | os.PathLike[str], flags: int, mode: int = 0o666, *, exact: bool = False
    ) -> None:
        """Opens `path`, close-on-exec. `exact` refuses one that is a symbolic link (ELOOP)."""
        self._numbers: list[int] = []
        flags |= os.O_CLOEXEC | (os.O_NOFOLLOW if exact else 0)
        self._numbers.append(os.open(path, flags, mode))

    @property
    def number(self) -> int:
        """-1 once closed."""
        return self._numbers[0] if self._numbers else -1

    def close(self) -> None:
        """Idempotent."""
        while self._numbers:
            os.close(self._numbers.pop())

    def __enter__(self) -> "Descriptor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_numbers", None):
            self.close()
