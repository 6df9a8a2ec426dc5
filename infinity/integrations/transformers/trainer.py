"""``OffloadMixin``: any class that derives from ``transformers.Trainer``, within a budget.

What the trainer does with a model in memory (placing it, preparing it, clipping, saving, loading)
is done with the offloaded one instead; its loop, its data and its callbacks are its own.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME

import infinity
from infinity.integrations import takeover
from infinity.integrations.transformers import folders, lives, memory_checkpoints
from infinity.integrations.transformers.arguments import NAMES, options_of
from infinity.integrations.transformers.lives import Life, make_way, models_beside
from infinity.integrations.transformers.model_files import weights
from infinity.integrations.transformers.model_files.streamed import stream_named
from infinity.integrations.transformers.refusals import (
    check_arguments,
    check_class_of,
    check_objects,
)
from infinity.integrations.transformers.saves import STATE, Saves
from infinity.parameters.offloaded.handlers import check_not_amid

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

logger = logging.getLogger(__name__)


class OffloadMixin(_Base):
    """Goes first among the bases: ``class OffloadSFTTrainer(OffloadMixin, SFTTrainer): ...``.

    Takes the options of ``infinity.offload`` (``nvme``, ``host_memory``, ``device_memory``,
    ``compute_dtype``, ``state_dtype``, ``activations``, ``max_parameter_bytes``, ``weights``,
    ``verify_swap``) as keyword arguments, or from ``args`` where that is an ``OffloadArguments`` or
    inherits from ``OffloadArgumentsMixin``. Raises ``ValueError`` naming an option of the trainer
    that cannot be honoured, before anything is loaded.

    The model is offloaded by the first ``train``, ``evaluate`` or ``predict``, and stays so: what
    follows (more training, evaluation, ``save_model``) keeps the budget, too. ``close()``, the end
    of ``with OffloadTrainer(...) as trainer`` or of the trainer itself gives the model its trained
    values back, as real tensors in memory (or leaves it on meta, if it came so). An exception or
    an interrupt in ``train`` leaves the trainer usable.
    """

    args: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    _created_lr_scheduler: bool

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        order = [base for base in cls.__mro__ if base in (OffloadMixin, Trainer)]
        if order == [Trainer, OffloadMixin]:
            raise TypeError(
                f"class {cls.__name__}: OffloadMixin goes first among the bases, before the trainer"
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in NAMES if name in kwargs}
        bound = inspect.signature(super().__init__).bind_partial(*args, **kwargs)
        passed = bound.arguments
        check_arguments(passed.get("args"))
        check_objects(passed)
        if "args" in passed:
            passed["args"] = self._own_arguments(passed["args"])
        self._offload_options = options_of(passed.get("args"), given)
        self._offload_streamed = stream_named(type(self), passed)
        self._offload_life: Life | None = None
        self._offload_saves: Saves | None = None
        self._offload_is_making = False
        optimizers: tuple[Any, Any] = passed.get("optimizers") or (None, None)
        lives.make_way_early(type(self), OffloadMixin, passed.values())
        super().__init__(*bound.args, **bound.kwargs)
        self._offload_streamed.complete(self.model)
        check_arguments(self.args)  # some trainers make their own
        self._offload_given, self._offload_scheduler = optimizers
        if self._offload_given is not None:
            options = self._offload_options
            takeover.choice_of(
                self._offload_given,
                self.model,
                options.state_dtype,
                is_tiled=options.max_parameter_bytes is not None,
            )

    def _own_arguments(self, arguments: Any) -> Any:
        """What this trainer reads; see ``infinity.integrations.trl``."""
        check_class_of(arguments, type(self))
        return arguments

    @property
    def offloaded(self) -> infinity.OffloadedModel:
        """The handle of the offloaded model. Raises ``RuntimeError`` while it is not offloaded."""
        if self._offload_life is None:
            raise RuntimeError("the model is offloaded by the first train, evaluate or predict")
        return self._offload_life.offloaded

    def close(self) -> None:
        """Finish saves, and give the model its trained values back. Idempotent.

        Raises what ``infinity.offload`` raises at the end of its block, the error of a save, and
        ``RuntimeError`` in a handler of a signal that came in the midst of a step or of a save.
        """
        life = self._offload_life
        if life is None:
            return
        check_not_amid("close()")
        if self._offload_saves is not None:
            self._offload_saves.check_staged("close()")
        self._offload_life = None
        if self._offload_given is not None and life.trains:
            takeover.give_rates_back(self._offload_given, life.offloaded.optimizer)
        try:
            self._finish_saves()
        finally:
            self.optimizer = self.callback_handler.optimizer = None
            life.close()

    def __enter__(self) -> OffloadMixin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The life of the model.

    def _open(self, *, trains: bool) -> None:
        """Offload the model, if it is not; for inference alone if it is not to be trained."""
        life = self._offload_life
        if life is not None and life.offloaded.model is self.model and life.trains >= trains:
            return
        self.close()
        beside = models_beside(self)
        make_way([self.model, *beside])
        self._offload_life = Life(
            self,
            beside,
            self._offload_options,
            self._offload_streamed.weights_for,
            self.args.device,
            self._framework_optimizer if trains else None,
        )
        self._prepare_model()
        if trains:
            self.optimizer = self.offloaded.optimizer
            if self._offload_scheduler is not None:
                scheduler = self._offload_scheduler
                takeover.redirect(scheduler, scheduler.optimizer, self.optimizer)

    def _framework_optimizer(self) -> torch.optim.Optimizer:
        """What this trainer would train the model in memory with; it has no state yet."""
        given: torch.optim.Optimizer | None = self._offload_given
        if given is not None:
            return given
        self.optimizer, self._offload_is_making = None, True
        try:
            # Maybe that of a class which derives from this one.
            made: torch.optim.Optimizer | None = self.create_optimizer()
            found: torch.optim.Optimizer = self.optimizer if made is None else made
            return found
        finally:
            self.optimizer, self._offload_is_making = None, False

    def _prepare_model(self) -> None:
        """Mixed precision, as ``accelerator.prepare`` does; placing is not its business here."""
        self.accelerator.prepare_model(self.model, evaluation_mode=True)
        self.model._is_accelerate_prepared = True

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Weights go to the device when they are needed there."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # Models that trainers prepare for evaluation are not to be moved either.
        prepare: Any = self.accelerator.prepare_model
        self.accelerator.prepare_model = partial(prepare, device_placement=False)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        self.close()
        return super().call_model_init(trial)

    # Training.

    def train(self, *args: Any, **kwargs: Any) -> Any:
        folders.recover(Path(self.args.output_dir))
        try:
            outcome = super().train(*args, **kwargs)
        except BaseException:
            self.is_in_train = False
            self._finish_saves_after_failure()
            raise
        self._finish_saves()
        return outcome

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._open(trains=True)
        return super()._inner_training_loop(*args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Offload the model for training; the optimizer is that of the offloaded one."""
        if self._offload_is_making:
            made: torch.optim.Optimizer = super().create_optimizer(model)
            return made
        self._open(trains=True)
        return self.offloaded.optimizer

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        if self._created_lr_scheduler:
            self.lr_scheduler = None
            self._created_lr_scheduler = False
        OffloadMixin.create_optimizer(self)
        self._prepare_model()
        self.create_scheduler(num_training_steps=max_steps)
        self.model_wrapped = self.model
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._offload_saves is not None:
            self._offload_saves.publish_if_done()
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if self._offload_life is not None:
            self._offload_life.is_saved = False  # from the step on that comes now
        return super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._finish_saves()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self._open(trains=self._will_train())
        return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        self._open(trains=self._will_train())
        return super().predict(*args, **kwargs)

    def _will_train(self) -> bool:
        """Whether a model that is offloaded now gets optimizer state."""
        return self.is_in_train or self.train_dataset is not None

    # Saving.

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As ever, in a folder that becomes ``checkpoint-<step>`` when all of it is durable."""
        self._finish_saves("_save_checkpoint()")
        run = Path(super()._get_output_dir(trial))
        saves = Saves(run, f"checkpoint-{self.state.global_step}", self)
        try:
            self._offload_saves = saves
            with saves.staging():
                super()._save_checkpoint(model, trial)
                saves.staged()
        except BaseException:
            self._offload_saves = None  # there is nothing of it
            raise
        if not self._may_publish_later():
            self._finish_saves()

    def _get_output_dir(self, trial: Any) -> str:
        saves = self._offload_saves
        if saves is not None and saves.is_staging:
            return str(saves.staging_folder)
        return super()._get_output_dir(trial)

    def _may_publish_later(self) -> bool:
        """Unless something looks for the folder as soon as it is said to be saved."""
        watchers = [
            type(callback)
            for callback in self.callback_handler.callbacks
            if not _leaves_saves_alone(type(callback))
        ]
        return not (watchers or self.args.push_to_hub or self.args.enable_jit_checkpoint)

    def _finish_saves(self, call: str = "train()") -> None:
        if self._offload_saves is not None:
            self._offload_saves.check_staged(call)
        saves, self._offload_saves = self._offload_saves, None
        if saves is not None:
            saves.finish()

    def _finish_saves_after_failure(self) -> None:
        """What was saved before something else failed is a checkpoint, too."""
        saves, self._offload_saves = self._offload_saves, None
        try:
            if saves is not None:
                saves.finish()
        except Exception:  # of whatever kind: what stopped training is what is raised
            logger.exception("a checkpoint could not be saved, while training was stopped")

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self._offload_life is None or state_dict is not None:
            super()._save(output_dir, state_dict)
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        saves = self._offload_saves
        if saves is not None and saves.is_staging:
            folder.mkdir(parents=True, exist_ok=True)
            self._write_folder(folder)
            return
        self._finish_saves()  # what is written now may be meant for its folder
        with folders.replacing(folder) as staged:
            self._write_folder(staged)

    def _write_folder(self, folder: Path) -> None:
        weights.write_model(self.offloaded, folder)
        processing = self.processing_class
        if processing is None:
            processing = getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)
        torch.save(self.args, folder / TRAINING_ARGS_NAME)
        if self._offload_life is not None:
            self._offload_life.is_saved = True

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        saves, path = self._offload_saves, Path(output_dir) / STATE
        if saves is not None and saves.is_staging:
            saves.pending = self.offloaded.save(path, block=False)
        else:
            self.offloaded.save(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that its state has none of the optimizer
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    # Loading.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights come with the rest where we saved them; see ``_load_optimizer_and_scheduler``."""
        folder = Path(resume_from_checkpoint)
        if (folder / STATE).is_dir():
            return
        weights.check_weights(self.model, folder)
        self._open(trains=True)
        if self._offload_life is not None and memory_checkpoints.is_of_memory(folder):
            memory_checkpoints.check_and_read_weights(self._offload_life, folder)
        else:
            self._read_folder(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder, life = Path(checkpoint or ""), self._offload_life
        if checkpoint is None or life is None:
            return
        if (folder / STATE).is_dir():
            life.offloaded.load(folder / STATE)
        elif memory_checkpoints.is_of_memory(folder):
            memory_checkpoints.take_state(life, folder)
        else:
            return
        state = torch.load(folder / SCHEDULER_NAME, weights_only=True)
        self.lr_scheduler.load_state_dict(state)

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint or "")
        logger.info("Loading best model from %s (score: %s).", folder, self.state.best_metric)
        if (folder / STATE).is_dir():
            weights.read_state(self.offloaded, folder / STATE)
        else:
            self._read_folder(folder)

    def _read_folder(self, folder: Path) -> None:
        missing = weights.read_folder(self.offloaded, folder)
        if missing:
            logger.warning("%s has no values of %s", folder, ", ".join(missing))


class OffloadTrainer(OffloadMixin, Trainer):
    """``transformers.Trainer`` within a budget, see ``OffloadMixin``."""


def _leaves_saves_alone(callback: type) -> bool:
    from transformers import TrainerCallback

    return callback.on_save is TrainerCallback.on_save  # type: ignore[attr-defined]
