"""One checkpoint of a trainer, from its first file to the rename that makes it exist."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints

import checkpoint
from infinity.integrations import published

logger = logging.getLogger(__name__)
STATE = "infinity"
"""Folder within a checkpoint that ``offloaded.save`` wrote."""


class Saves:
    """``checkpoint-<step>`` of ``trainer`` in the folder ``run``. States: new, staging, staged,
    then published or dropped.
    """

    def __init__(self, run: Path, name: str, trainer: Any) -> None:
        self._run = run
        self._name = name
        self._stack = ExitStack()
        self._folder: Path | None = None
        self._final = run / name
        self._trainer = trainer
        self.pending: checkpoint.PendingSave | None = None
        self.is_staging = False
        self._is_staged = False

    @property
    def staging_folder(self) -> Path:
        """Of this checkpoint alone; other trainers may save to the same run."""
        assert self._folder is not None, "nothing is staged yet"
        return self._folder

    @property
    def _staged(self) -> Path:
        return self.staging_folder / self._name

    @contextmanager
    def staging(self) -> Iterator[None]:
        """What is saved inside goes to the staging folder; nothing of it stays after an error."""
        self._folder = self._stack.enter_context(published.staging(self._run))
        self._staged.mkdir()
        self.is_staging = True
        try:
            yield
        except BaseException:
            self._drop()
            raise
        finally:
            self.is_staging = False

    def staged(self) -> None:
        """All files but those of the pending save are there. The best checkpoint may be this one,
        which will have another name, or one before it, for which the trainer looks beside this one.
        """
        state = self._trainer.state
        name = f"checkpoint-{state.best_global_step}"
        found = self._final.parent / name
        if state.best_global_step and (name == self._staged.name or found.is_dir()):
            state.best_model_checkpoint = str(found)
            state.save_to_json(str(self._staged / TRAINER_STATE_NAME))
        self._is_staged = True

    def check_staged(self, call: str) -> None:
        """Raise ``RuntimeError`` if the ``call``, which is to publish it, is one of a handler that
        broke into the save: half of it would be a checkpoint.
        """
        if not self._is_staged:
            raise RuntimeError(
                f"{call} while {self._name} is being saved, by the handler of a signal: there is "
                f"half of it. Set a flag there, and use {call} when the save has ended"
            )

    def publish_if_done(self) -> None:
        """Without waiting."""
        if self.pending is None or self.pending.done():
            self._trainer._finish_saves()

    def finish(self) -> None:
        """Wait until all is durable, and publish; drop what an interrupt has left half of. Raises
        what kept it from being saved.
        """
        if not self._is_staged:
            self._drop()
            return
        try:
            if self.pending is not None:
                self.pending.result()
            published.publish(self._staged, self._final)
        except BaseException:
            self._drop()
            raise
        self._stack.close()
        arguments, state = self._trainer.args, self._trainer.state
        rotate_checkpoints(
            output_dir=str(self._final.parent),
            save_total_limit=arguments.save_total_limit,
            best_model_checkpoint=state.best_model_checkpoint,
            use_mtime=True,
        )

    def _drop(self) -> None:
        if self.pending is not None:
            self.pending.wait_done()
        self._stack.close()
