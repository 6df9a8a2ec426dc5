"""``lightning.Trainer`` within a budget: a strategy that says where state is::

    from infinity.integrations.lightning import OffloadStrategy

    trainer = Trainer(strategy=OffloadStrategy(nvme="/mnt/nvme0", host_memory="8GiB"), devices=1)

The optimizer and the schedulers of ``configure_optimizers`` are taken over. A checkpoint is a
folder: what Lightning keeps in ``checkpoint.ckpt``, the rest as ``offloaded.save`` writes it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn

import infinity
from infinity.arguments import Directories
from infinity.integrations import published
from infinity.integrations.lightning_signals import SignalsBetweenSteps
from infinity.integrations.state_dicts import OffloadedStateDict, WeightsOfFolder, set_values
from infinity.integrations.takeover import OffloadOptions, enter_offload, redirect
from infinity.model import training_of
from infinity.values.module_state import module_states, set_module_states

if TYPE_CHECKING:
    _Base: Any = object
else:
    _Base = SingleDeviceStrategy

REST = "checkpoint.ckpt"
"""What Lightning keeps, within a checkpoint."""
STATE = "infinity"
"""What ``offloaded.save`` wrote."""
WEIGHTS = "weights"
"""In its place what ``offloaded.export`` wrote, where weights alone are kept."""
_MODULES = "module_states"
"""Among what Lightning keeps then: what state dicts hold beside weights and buffers."""


class OffloadStrategy(_Base):  # type: ignore[misc]
    """Takes the arguments of ``infinity.offload``: ``nvme``, ``host_memory``, ``device_memory``,
    ``compute_dtype``, ``activations``, ``weights``, ``max_parameter_bytes``, ``verify_swap``; and
    ``state_dtype``, that of the moments of ``torch.optim.AdamW``.

    The module is offloaded by ``fit``, ``validate``, ``test`` and ``predict``, and has its values
    in memory again when these end. Raises ``ValueError`` naming an option of the trainer that
    cannot be honoured, before anything is loaded.
    """

    strategy_name = "offload"

    def __init__(
        self,
        nvme: Directories,
        *,
        host_memory: int | str | None = None,
        device_memory: int | str | None = None,
        compute_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype = torch.float32,
        activations: str = "keep",
        max_parameter_bytes: int | str | None = None,
        weights: str | os.PathLike[str] | None = None,
        verify_swap: bool = False,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        if compute_dtype == torch.float16:
            raise ValueError(
                "compute_dtype=torch.float16 needs a loss scale, which Lightning would not save; "
                "use torch.bfloat16"
            )
        self._options = OffloadOptions(
            nvme=nvme,
            host_memory=host_memory,
            device_memory=device_memory,
            compute_dtype=compute_dtype,
            state_dtype=state_dtype,
            activations=activations,
            max_parameter_bytes=max_parameter_bytes,
            weights=weights,
            verify_swap=verify_swap,
        )
        self._given_device = None if device is None else torch.device(device)
        self._stack = ExitStack()
        self._offloaded: infinity.OffloadedModel | None = None
        self._loading: Path | None = None
        self._random: torch.Tensor | None = None
        self._signals: SignalsBetweenSteps | None = None
        super().__init__(device="cpu" if device is None else device, **kwargs)

    @property
    def offloaded(self) -> infinity.OffloadedModel:
        """The handle, from ``setup`` to ``teardown``. Raises ``RuntimeError`` at other times."""
        if self._offloaded is None:
            raise RuntimeError(
                "the module is offloaded while fit, validate, test or predict runs; after them it "
                "has its values in memory, and its optimizer is gone: save a checkpoint in fit (by "
                "ModelCheckpoint(save_last=True), or trainer.save_checkpoint in a callback), or "
                "module.state_dict() now"
            )
        return self._offloaded

    @property
    def root_device(self) -> torch.device:
        if self._given_device is not None:
            return self._given_device
        is_cuda = isinstance(self.accelerator, CUDAAccelerator)
        return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")

    # The life of the module.

    def setup(self, trainer: Any) -> None:
        """Offload the module, for training when the trainer fits."""
        _check(trainer, self.precision_plugin, self._checkpoint_io)
        self.accelerator.setup(trainer)
        self.model: Any = self.precision_plugin.convert_module(self.model)
        made = None
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            made = self._only_optimizer()
        self._offloaded = enter_offload(
            self._stack, self.lightning_module, made, self._options, self.root_device
        )
        if made is not None:
            for config in self.lr_scheduler_configs:
                redirect(config.scheduler, made, self._offloaded.optimizer)
            self.optimizers = [self._offloaded.optimizer]
        self.setup_precision_plugin()
        self._signals = SignalsBetweenSteps(trainer)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """The trainer comes here as a run begins, when its handlers of signals are registered."""
        super().barrier(*args, **kwargs)
        if self._signals is not None:
            self._signals.take()

    def _only_optimizer(self) -> torch.optim.Optimizer | None:
        if len(self.optimizers) > 1:
            raise ValueError(
                f"configure_optimizers gives {len(self.optimizers)} optimizers, and an offloaded "
                "module has one; give one with several groups"
            )
        for made in self.optimizers:
            if made.param_groups:
                return made
        return None

    def model_to_device(self) -> None:
        """Weights go to the device when they are needed there."""

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        moved = super().batch_to_device(batch, *args, **kwargs)
        dtype = self._options.compute_dtype
        return moved if dtype is None else _cast(moved, dtype)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """In host memory, or on meta with ``empty_init``: values are then those of ``weights=``."""
        with torch.device("meta" if empty_init else "cpu"):
            yield

    def teardown(self) -> None:
        """The module gets its trained values, when what signals have asked for is done. Raises as
        the end of ``infinity.offload`` does.
        """
        signals, self._signals = self._signals, None
        with ExitStack() as last:
            last.callback(super().teardown)
            last.callback(self._reset_optimizers_and_schedulers)
            if signals is not None:
                last.callback(signals.give_back)
            last.callback(self._leave)
            if signals is not None:
                signals.end()

    def _leave(self) -> None:
        self._offloaded = self._loading = self._random = None
        self._stack.close()

    # Checkpoints.

    def lightning_module_state_dict(self) -> Any:
        """A mapping that reads each tensor when it is asked for."""
        return OffloadedStateDict(self.offloaded)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """A folder at ``filepath``, complete from the moment that it has its name."""
        rest = dict(checkpoint)
        values = rest.pop("state_dict")
        if not isinstance(values, OffloadedStateDict):
            raise ValueError(
                "state_dict of the checkpoint was replaced by a callback or on_save_checkpoint; "
                "leave it, the weights are streamed to disk"
            )
        if "optimizer_states" not in rest:
            rest[_MODULES] = module_states(self.offloaded.model)
        final = _local(filepath)
        if final.is_dir() and not (final / REST).is_file():
            what = "a folder that is no checkpoint is not replaced by one; give another path"
            raise IsADirectoryError(errno.EISDIR, what, str(final))
        with self._saving(), published.replacing(final, keeps_others=False) as staged:
            self.checkpoint_io.save_checkpoint(rest, staged / REST, storage_options=storage_options)
            if "optimizer_states" in rest:
                self.offloaded.save(staged / STATE)
            else:
                self.offloaded.export(staged / WEIGHTS)

    def _saving(self) -> AbstractContextManager[None]:
        return nullcontext() if self._signals is None else self._signals.saving()

    def remove_checkpoint(self, filepath: Any) -> None:
        published.remove(_local(filepath))

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """State and options come with ``load_model_state_dict``."""
        return False

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        path = _local(checkpoint_path)
        published.recover(path)
        self._loading = path if path.is_dir() else None
        file = path / REST if path.is_dir() else path
        loaded = self.checkpoint_io.load_checkpoint(file, weights_only=weights_only)
        if self._loading is not None:
            loaded["state_dict"] = {}
        elif loaded.get("optimizer_states") and self.optimizers:
            raise ValueError(
                f"{path} has an optimizer that was kept in memory, which cannot be taken over; "
                "begin with its weights: fit without ckpt_path, a module that has loaded them"
            )
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        folder = self._loading
        if folder is None:
            set_values(self.offloaded, checkpoint["state_dict"], strict=strict)
        elif (folder / STATE).is_dir():
            self._load_state(folder / STATE)
        else:
            set_values(self.offloaded, WeightsOfFolder(folder / WEIGHTS), strict=strict)
            device = training_of(self.offloaded).state.device
            set_module_states(self.offloaded.model, checkpoint.get(_MODULES, {}), device)

    def _load_state(self, saved: Path) -> None:
        """Torch's random state is that of the checkpoint where ``fit`` goes on, as it was where
        weights are evaluated.
        """
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self.offloaded.load(saved)
            self._random = torch.get_rng_state()
            return
        device = self.root_device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            self.offloaded.load(saved)

    def on_train_start(self) -> None:
        """An epoch that goes on behind its last batch has had iterators made for no batch, and the
        next one makes its own: only these have drawn numbers in a run that was not stopped.
        """
        super().on_train_start()
        loop = self.lightning_module.trainer.fit_loop
        batches = loop.epoch_loop
        is_behind = batches.restarted_on_last and batches._num_ready_batches_reached()
        if self._random is not None and loop.restarting and is_behind:
            torch.set_rng_state(self._random)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Within an epoch, what made iterators anew has drawn numbers that were drawn before."""
        state, self._random = self._random, None
        if state is not None and batch_idx:
            torch.set_rng_state(state)


_AVERAGING = ("StochasticWeightAveraging", "WeightAveraging")
_UNFREEZING = "BaseFinetuning"
_PRUNING = "ModelPruning"


def _check(trainer: Any, precision: Any, checkpoint_io: Any) -> None:
    """Raises ``ValueError`` naming what cannot be honoured."""
    connector = trainer._accelerator_connector  # the trainer itself asks the strategy
    devices, nodes = len(connector._parallel_devices), connector._num_nodes_flag
    if devices > 1 or nodes > 1:
        raise ValueError(
            f"devices={devices} and num_nodes={nodes} cannot be honoured "
            "with offloading: give devices=1; to train over several, write the loop and call "
            "infinity.offload(..., process_group=torch.distributed.group.WORLD)"
        )
    for callback in trainer.callbacks:
        if any(kind.__name__ in _AVERAGING for kind in type(callback).__mro__):
            raise ValueError(
                f"the callback {type(callback).__name__} cannot be honoured with offloading: it "
                "keeps a second model in memory and writes it over this one; leave it out, and "
                "average the weights of checkpoints after (ModelCheckpoint(save_top_k=-1))"
            )
        if any(kind.__name__ == _UNFREEZING for kind in type(callback).__mro__):
            raise ValueError(
                f"the callback {type(callback).__name__} cannot be honoured with offloading: it "
                "unfreezes parameters in the midst of fit, and what is frozen as fit begins has no "
                "optimizer state; leave it out, fit with requires_grad_(False) on what is to be "
                "frozen first, then fit again (without ckpt_path) with requires_grad_(True)"
            )
        if any(kind.__name__ == _PRUNING for kind in type(callback).__mro__):
            raise ValueError(
                f"the callback {type(callback).__name__} cannot be honoured with offloading: it "
                "replaces parameters in the midst of fit; leave it out, and prune the model "
                "between two fits"
            )
    is_mixed = type(precision) is MixedPrecision and precision.precision == "bf16-mixed"
    if not is_mixed and type(precision) is not Precision:
        name = getattr(precision, "precision", type(precision).__name__)
        raise ValueError(
            f"precision={name!r} cannot be honoured with offloading: give '32-true' or "
            "'bf16-mixed'; OffloadStrategy(compute_dtype=torch.bfloat16) is bfloat16 with masters "
            "in float32"
        )
    if checkpoint_io is not None and type(checkpoint_io) is not TorchCheckpointIO:
        raise ValueError(
            f"the plugin {type(checkpoint_io).__name__} cannot be honoured with offloading: leave "
            "it out, checkpoints are streamed to a folder"
        )


def _local(path: Any) -> Path:
    if "://" in str(path):
        raise ValueError(f"{path} is not on a local file system, to which checkpoints are streamed")
    local = Path(path).absolute()
    if not local.name or local.name == "..":
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return local.parent.resolve() / local.name  # a link to a checkpoint is not that checkpoint


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    from lightning_utilities.core.apply_func import apply_to_collection

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_collection(batch, torch.Tensor, cast)
