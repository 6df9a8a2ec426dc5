"""Real tensors in parameters for as long as a program asks for them, and what becomes of its
changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from infinity.discovery import Record
from infinity.residency import Residency
from infinity.sharing import Sharing
from infinity.versions import Versions

Parameters = nn.Module | Iterable[torch.Tensor] | torch.Tensor | None


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
        with torch.inference_mode(False):  # or changes would not be counted
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


def records_of(
    params: Parameters, records: Sequence[Record], index_of: Callable[[torch.Tensor], int]
) -> Sequence[Record]:
    """What ``params`` means: a module, a parameter, several, or None for all."""
    if params is None:
        return records
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, torch.Tensor):
        params = [params]
    return [records[index_of(parameter)] for parameter in params]
