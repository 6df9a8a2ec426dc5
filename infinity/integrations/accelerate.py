"""``accelerate.Accelerator`` within a budget: a script changes the class, and says where state is::

    from infinity.integrations.accelerate import OffloadAccelerator

    accelerator = OffloadAccelerator(nvme="/mnt/nvme0", host_memory="8GiB")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The optimizer and the scheduler that the script made are taken over. What the accelerator does with
a model in memory (placing, saving, loading) is done with the offloaded one.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerate  # type: ignore[import-untyped]
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from torch import nn

import infinity
from infinity.arguments import Directories
from infinity.integrations import published
from infinity.integrations.state_dicts import OffloadedStateDict
from infinity.integrations.takeover import OffloadOptions, enter_offload, redirect
from infinity.parameters.offloaded.handlers import check_not_amid

if TYPE_CHECKING:
    _Base: Any = object
else:
    _Base = Accelerator

STATE = "infinity"
"""Folder within a saved state that ``offloaded.save`` wrote."""
_PLACES = "leave it out: infinity.offload places the weights, within the budget that you state"
_COMPILED = (
    "leave it out, and compile the layers of the model, each by itself, before prepare(): `for "
    "layer in model.model.layers: layer.compile()`"
)
_REFUSED = {
    "deepspeed_plugin": _PLACES,
    "deepspeed_plugins": _PLACES,
    "fsdp_plugin": _PLACES,
    "megatron_lm_plugin": _PLACES,
    "torch_tp_plugin": _PLACES,
    "parallelism_config": _PLACES,
    "dynamo_backend": _COMPILED,
    "dynamo_plugin": _COMPILED,
}
_PRECISION = (
    "use mixed_precision='bf16', or compute_dtype=torch.float16 without mixed_precision, for which "
    "backward() scales the loss"
)
_RANKS = (
    "start one process; to train over several, write the loop and call "
    "infinity.offload(..., process_group=torch.distributed.group.WORLD)"
)


class OffloadAccelerator(_Base):  # type: ignore[misc]
    """Takes the arguments of ``accelerate.Accelerator``, and of ``infinity.offload``: ``nvme``,
    ``host_memory``, ``device_memory``, ``compute_dtype``, ``activations``, ``weights``,
    ``max_parameter_bytes``, ``verify_swap``; and ``state_dtype``, that of the moments of
    ``torch.optim.AdamW``.

    ``prepare`` offloads the model that it is given with an optimizer, or, for inference, one that
    it is given alone. The budget is that of one model. ``free_memory()`` (or ``clear``,
    ``end_training``, the end of ``with OffloadAccelerator(...)``) gives the model its trained
    values back.

    Raises ``ValueError`` naming an argument that cannot be honoured, before anything is loaded.
    """

    def __init__(
        self,
        *args: Any,
        nvme: Directories,
        host_memory: int | str | None = None,
        device_memory: int | str | None = None,
        compute_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype = torch.float32,
        activations: str = "keep",
        max_parameter_bytes: int | str | None = None,
        weights: str | os.PathLike[str] | None = None,
        verify_swap: bool = False,
        **kwargs: Any,
    ) -> None:
        for name, remedy in _REFUSED.items():
            if kwargs.get(name) is not None:
                raise ValueError(f"{name} cannot be honoured with offloading: {remedy}")
        self._offload_options = OffloadOptions(
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
        self._offload_stack = ExitStack()
        self._offloaded: infinity.OffloadedModel | None = None
        self._offload_made: torch.optim.Optimizer | None = None
        self._offload_is_saving = False
        super().__init__(*args, **kwargs)
        self._check_accelerator()
        self.register_save_state_pre_hook(self._save_offloaded)
        self.register_load_state_pre_hook(self._load_offloaded)

    def _check_accelerator(self) -> None:
        """What a configuration or the environment may have asked for, too."""
        kind = self.distributed_type
        if kind != DistributedType.NO:
            raise ValueError(f"distributed type {kind.value} cannot be honoured: {_RANKS}")
        if self.mixed_precision not in ("no", "bf16"):
            raise ValueError(
                f"mixed_precision={self.mixed_precision!r} cannot be honoured with offloading: "
                f"{_PRECISION}"
            )
        backend = self.state.dynamo_plugin.backend
        if str(getattr(backend, "value", backend)).upper() != "NO":
            raise ValueError(
                f"dynamo backend {backend} cannot be honoured with offloading: {_COMPILED}"
            )

    @property
    def offloaded(self) -> infinity.OffloadedModel:
        """The handle of the offloaded model. Raises ``RuntimeError`` before ``prepare``."""
        if self._offloaded is None:
            raise RuntimeError("no model is offloaded: accelerator.prepare(model, optimizer) does")
        return self._offloaded

    def close(self) -> None:
        """Give the model its trained values back. Idempotent; raises what ``infinity.offload``
        raises at the end of its block, and ``RuntimeError`` in a handler of a signal that came in
        the midst of a step or of a save.
        """
        if self._offloaded is not None:
            check_not_amid("close()")
        if self._offload_is_saving:
            raise RuntimeError(
                "close() while save_state() is under way, by the handler of a signal: what is "
                "saved would lack the model. Set a flag there, and use close() when the save "
                "has ended"
            )
        self._offloaded = self._offload_made = None
        self._offload_stack.close()

    def __enter__(self) -> OffloadAccelerator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Preparing.

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As ever. A model and its optimizer are best given together."""
        optimizers = [entry for entry in args if _is_plain_optimizer(entry)]
        models = [entry for entry in args if isinstance(entry, nn.Module)]
        for model in models:
            own = [made for made in optimizers if _is_of(made, model)]
            if len(own) > 1:
                raise ValueError(
                    f"{len(own)} optimizers of one model cannot be honoured with offloading: make "
                    "one with several groups"
                )
            self._offload(model, own[0] if own else None)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        self._offload(model, None)
        prepared: nn.Module = super().prepare_model(
            model, device_placement=False, evaluation_mode=True
        )
        if hasattr(type(model), "save_pretrained"):
            from infinity.integrations.transformers.model_files.methods import serve_methods

            serve_methods(self._offload_stack, self.offloaded)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        if _is_plain_optimizer(optimizer) and optimizer is not self._offload_made:
            for model in self._models:
                if _is_of(optimizer, model):
                    self._offload(model, optimizer)
        if optimizer is self._offload_made:
            optimizer = self.offloaded.optimizer
        elif _is_plain_optimizer(optimizer):
            raise ValueError(
                f"the {type(optimizer).__name__} is of no model that was prepared; give "
                "accelerator.prepare the model with it"
            )
        return super().prepare_optimizer(optimizer, device_placement=device_placement)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        if self._offload_made is not None:
            redirect(scheduler, self._offload_made, self.offloaded.optimizer)
        return super().prepare_scheduler(scheduler)

    def _offload(self, model: nn.Module, made: torch.optim.Optimizer | None) -> None:
        """Offload ``model`` to be trained by what ``made`` says, or for inference."""
        if self._offloaded is not None:
            if self._offloaded.model is not model:
                raise ValueError(
                    "host_memory is for one model, and another was prepared; offload that by "
                    "infinity.offload(..., optimizer=None, host_memory=...) itself, or, where both "
                    "are trained, prepare one torch.nn.ModuleDict of them with one optimizer"
                )
            if made is None or made is self._offload_made:
                return
            if self._offload_made is not None:
                raise ValueError("the model has an optimizer already; make one with all groups")
            self.close()
        self._offloaded = enter_offload(
            self._offload_stack, model, made, self._offload_options, self.device
        )
        self._offload_made = made

    # Training.

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        if kwargs or self._offloaded is None:
            super().backward(loss, **kwargs)
        else:
            self._offloaded.backward(loss / self.gradient_accumulation_steps)

    # Saving and loading.

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """For an offloaded model a mapping that reads each tensor when it is asked for."""
        if self._is_offloaded(model):
            return OffloadedStateDict(self.offloaded)
        return super().get_state_dict(model, unwrap=unwrap)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Safetensors shards with an index; ``max_shard_size`` is that of ``offloaded.export``."""
        if not self._is_offloaded(model):
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        if not safe_serialization:
            raise ValueError("safe_serialization=False cannot be honoured: weights are streamed")
        self.offloaded.export(save_directory)

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any
    ) -> str:
        """As ever, in a folder that is complete from the moment that it has its name. One that can
        have no other name (a disk, the current directory) gets what is saved moved into it: all of
        it, also if this is killed meanwhile and ``load_state`` comes next.
        """
        config = self.project_configuration
        is_named = config.automatic_checkpoint_naming
        final = self._next_folder() if is_named else _expanded(output_dir or "")
        if not is_named and output_dir is None:
            raise ValueError("save_state needs an output_dir, or automatic_checkpoint_naming")
        config.automatic_checkpoint_naming = False
        was_saving, self._offload_is_saving = self._offload_is_saving, True
        try:
            with published.replacing(final.resolve()) as staged:  # a link stays one
                super().save_state(str(staged), *args, **kwargs)
        finally:
            self._offload_is_saving = was_saving
            config.automatic_checkpoint_naming = is_named
        if is_named and config.total_limit is not None:
            for old in _numbered(final.parent)[: -config.total_limit]:
                shutil.rmtree(old)
        return str(final)

    def _next_folder(self) -> Path:
        folder = Path(self.project_dir) / "checkpoints" / f"checkpoint_{self.save_iteration}"
        if folder.exists():
            raise ValueError(
                f"Checkpoint directory {folder} ({self.save_iteration}) already exists. Please "
                "manually override `self.save_iteration` with what iteration to start with."
            )
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As ever; what a killed process was replacing is put back first."""
        if input_dir is not None:
            published.recover(_expanded(input_dir).resolve())
        elif self.project_configuration.automatic_checkpoint_naming:
            input_dir = str(_latest(Path(self.project_dir) / "checkpoints"))
        super().load_state(input_dir, *args, **kwargs)

    def _save_offloaded(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        """A hook of ``save_state``: what is left in ``weights`` the accelerator saves."""
        weights[:] = [state for state in weights if not isinstance(state, OffloadedStateDict)]
        if self._offloaded is not None:
            self._offloaded.save(Path(folder) / STATE)

    def _load_offloaded(self, models: list[nn.Module], folder: str) -> None:
        """A hook of ``load_state``: what is left in ``models`` the accelerator loads."""
        if self._offloaded is None:
            return
        if not (Path(folder) / STATE).is_dir():
            raise ValueError(
                f"{folder} was saved by an Accelerator that keeps its model in memory; pass its "
                "weights to OffloadAccelerator(weights=...), and begin with these"
            )
        self._offloaded.load(Path(folder) / STATE)
        models[:] = [model for model in models if not self._is_offloaded(model)]

    def _is_offloaded(self, model: nn.Module) -> bool:
        return self._offloaded is not None and self._offloaded.model is model

    # Ending.

    def free_memory(self, *objects: Any) -> Any:
        """As ever; the model has its trained values again, in memory."""
        self.close()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        self.close()
        super().end_training()


def _is_plain_optimizer(entry: Any) -> bool:
    is_prepared = isinstance(entry, accelerate.optimizer.AcceleratedOptimizer)
    return isinstance(entry, torch.optim.Optimizer) and not is_prepared


def _is_of(made: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether the optimizer has a parameter of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in made.param_groups for parameter in group["params"])


def _expanded(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.expanduser(path))  # noqa: PTH111  the name of no user stays as it is


def _numbered(folder: Path) -> list[Path]:
    """``checkpoint_<n>``, the oldest first."""
    found = [path for path in folder.glob("checkpoint_*") if path.name[11:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[11:]))


def _latest(folder: Path) -> Path:
    for path in _numbered(folder)[::-1]:
        return path
    raise ValueError(f"{folder} has no checkpoint_<n>")
