"""Real tensors in parameters for as long as a program asks for them, and what becomes of its
changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from infinity.discovery import Record
from infinity.residency import Residency
from infinity.sharing import Sharing
from infinity.versions import Versions


@contextmanager
def real_tensors(
    chosen: Sequence[Record],
    modify: bool,
    residency: Residency,
    sharing: Sharing,
    versions: Versions,
) -> Iterator[None]:
    """Whole weights of their own in the ``chosen`` parameters; with ``modify`` they are taken back.

    Raises ``RuntimeError`` naming what else was changed inside; nothing is taken back then.
    """
    residency.keep_out(record.index for record in chosen)
    try:
        for record in chosen:
            residency.put(record.index, sharing.weight_of(record))
        yield
        versions.check()
        if modify:
            for record in chosen:
                sharing.write_back(record)
    finally:
        residency.let_in(record.index for record in chosen)
        versions.note(record.index for record in chosen)
