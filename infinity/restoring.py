"""What becomes of a model when it leaves the block: real tensors with the trained values, where it
came from.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from checkpoint.errors import RankFailedError
from infinity.collectives import LEAVE
from infinity.discovery import Record
from infinity.parameter import become_plain, replace_parameter, take_grad
from infinity.sharing import Sharing

_log = logging.getLogger(__name__)


def restore(model: nn.Module, records: Sequence[Record], sharing: Sharing, steps: int) -> None:
    """Give every parameter its values, on the device and in the dtype that it came with.

    Values of partitioned parameters are with all ranks. Where some rank has failed they cannot be
    had any more: those parameters are on the meta device then.
    """
    if sharing.is_whole:
        try:
            sharing.drop_gradients()
            sharing.meet(LEAVE, steps)
        finally:
            _restore_each(model, records, sharing)
        return
    _restore_each(model, records, sharing)
    if any(record.is_partitioned for record in records):
        _log.warning(
            "parameters that were partitioned over ranks are on the meta device: their values went "
            "with the rank that failed; load the last checkpoint"
        )


def _restore_each(model: nn.Module, records: Sequence[Record], sharing: Sharing) -> None:
    failure = None
    for record in records:
        data = torch.empty(record.shape, dtype=record.dtype, device=record.device)
        try:
            if record.is_partitioned and not sharing.is_whole:
                data = data.to("meta")
            elif not data.is_meta:
                sharing.read_values(record, data)
        except RankFailedError as error:
            failure, data = error, data.to("meta")
        take_grad(record.parameter)
        restored = become_plain(record.parameter, record.kind, data)
        if restored is not record.parameter:
            replace_parameter(model, record.parameter, restored)
    if failure is not None:
        raise failure
