"""DeepSpeed's FastFileWriter, the writer of the FastPersist paper, as a contestant.

It writes what `torch.save` gives it in the old format, through two pinned buffers and libaio, and
`torch.load` reads it. Its kernels are compiled when they are first used, which takes minutes.
"""

from __future__ import annotations

from typing import Any

import torch

from checkpoint.bench.conditions.scratch import Place
from checkpoint.bench.conditions.settings import Setting
from checkpoint.bench.conditions.workload import State
from checkpoint.bench.systems.peers import OneFolder, quiet

_BUFFER_BYTES = 128 << 20


class DeepSpeed(OneFolder):
    """One writer, double-buffered, with the engine's default depth and block size."""

    name = "deepspeed"
    package = "deepspeed"

    def __init__(self) -> None:
        self._handle: Any = None
        self._buffer: Any = None

    @classmethod
    def unavailable_reason(cls) -> str | None:
        reason = super().unavailable_reason()
        if reason is not None:
            return reason
        with quiet():
            from deepspeed.ops.op_builder import AsyncIOBuilder

            if AsyncIOBuilder().is_compatible(verbose=False):
                return None
        return "DeepSpeed's async_io cannot be built here (it needs libaio-dev and ninja)"

    def save_folder(self, state: State, place: Place) -> None:
        writer = self._make_writer(place)
        torch.save(state.tensors, writer, _use_new_zipfile_serialization=False)
        writer.close()

    def load_folder(self, state: State, place: Place) -> dict[str, torch.Tensor]:
        loaded = torch.load(place.main / "state.pt", weights_only=True)
        assert isinstance(loaded, dict)
        return loaded

    def _make_writer(self, place: Place) -> Any:
        from deepspeed.io import FastFileWriter, FastFileWriterConfig, fast_file_writer

        if self._handle is None:
            self._prepare()
        # The builder of its cast to bytes is for accelerators only.
        fast_file_writer.UtilsBuilder = _CastBuilder
        config = FastFileWriterConfig(dnvme_handle=self._handle, pinned_tensor=self._buffer)
        return FastFileWriter(file_path=str(place.main / "state.pt"), config=config)

    def _prepare(self) -> None:
        """Compiles what must be compiled. The first, untimed run comes here."""
        from deepspeed.ops.op_builder import AsyncIOBuilder

        setting = Setting()
        self._handle = (
            AsyncIOBuilder()
            .load(verbose=False)
            .aio_handle(
                block_size=setting.block_bytes,
                queue_depth=setting.queue_depth,
                single_submit=False,
                overlap_events=True,
                intra_op_parallelism=1,
            )
        )
        like = torch.empty(0, dtype=torch.uint8)
        self._buffer = self._handle.new_cpu_locked_tensor(_BUFFER_BYTES, like)


class _CastBuilder:
    """Stands where DeepSpeed looks for its compiled cast."""

    def load(self) -> type[_CastBuilder]:
        return _CastBuilder

    @staticmethod
    def cast_to_byte_tensor(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.view(torch.uint8) for tensor in tensors]
