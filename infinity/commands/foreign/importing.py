"""The state of another library as a checkpoint that ``offloaded.load`` takes, streamed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import checkpoint
from infinity.commands.foreign.distributed import METADATA, read_distributed
from infinity.commands.foreign.state import MOMENTS, SHOWN, WIDENED, ForeignState, Shelf, Shelved
from infinity.commands.foreign.taking import KEPT_BY
from infinity.commands.foreign.torch_files import read_torch_file
from infinity.commands.foreign.universal import read_universal, universal_folder
from infinity.optim.torch_optimizer.state import IN_COMPONENTS
from infinity.values.initial.weight_files import WeightFolder
from infinity.values.initial.weight_names import Recipe, recipes_for
from infinity.values.persistence import FORMAT


def read_foreign(source: Path, model: nn.Module, *, is_ordered: bool) -> ForeignState:
    """Whatever is at ``source``. Raises ``ValueError`` for what is none of the three."""
    if source.is_file():
        return read_torch_file(source, model, is_ordered=is_ordered)
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist")
    zero = universal_folder(source)
    if zero is not None:
        return read_universal(zero, model)
    if (source / METADATA).is_file():
        return read_distributed(source, model)
    raise ValueError(
        f"{source} is neither a file of torch.save, nor a universal checkpoint of DeepSpeed (a "
        "folder with `zero`; its ds_to_universal.py makes one of a checkpoint of ZeRO), nor one of "
        "torch.distributed.checkpoint"
    )


@dataclass(frozen=True, slots=True)
class Imported:
    """A checkpoint that was written: what ``checkpoint.save`` says of it, the parameters whose
    weights came from the model's files, and whether the source had options of the optimizer.
    """

    info: checkpoint.SaveInfo
    taken: list[str]
    has_options: bool


def import_state(
    source: Path, model: nn.Module, files: WeightFolder, path: Path, *, is_ordered: bool
) -> Imported:
    """Write a checkpoint at ``path``.

    Weights that ``source`` has not come from ``files``. Where ``model`` was made of these alone
    (``is_ordered=False``), which of its tensors are buffers is told when it is loaded. Raises as
    ``read_foreign`` and ``checkpoint.save``, and ``ValueError`` naming what does not fit or is
    missing.
    """
    state = read_foreign(source, model, is_ordered=is_ordered)
    state.check(model, source)
    taken = [name for name, _ in model.named_parameters() if name not in state.weights]
    info = checkpoint.save(_tree(state, model, files), path)
    return Imported(info, taken, has_options=bool(state.groups))


def _tree(state: ForeignState, model: nn.Module, files: WeightFolder) -> dict[str, Any]:
    """As ``infinity.values.persistence`` has it, with no master beside weights."""
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    moments: dict[str, dict[str, Any]] = {part: {} for part in MOMENTS}
    for name, both in state.moments.items():
        for part, tensor in zip(MOMENTS, both, strict=True):
            moments[part][name] = tensor
    has_moments = {name: list(MOMENTS) if name in state.moments else [] for name in shapes}
    weights = _weights(state, model, files)
    return {
        "model": weights,
        "optimizer": moments,
        "extra": {"given": False, "value": None},
        "infinity": {
            "format": FORMAT,
            "steps": {name: state.steps.get(name, 0) for name in shapes},
            "planes": {name: ["weight", *has_moments[name]] for name in shapes},
            "shapes": shapes,
            "dtypes": {name: weights[name].dtype for name in shapes},
            "groups": list(state.groups),
            "is_grouped": state.is_grouped,
            "optimizer_class": KEPT_BY,
            "plane_dtypes": {
                name: dict.fromkeys(parts, torch.float32) for name, parts in has_moments.items()
            },
            "state_dtype": torch.float32,
            "state": None,
            "parts": {name: [p.numel()] for name, p in model.named_parameters()},
            "buffers": dict.fromkeys(_persistent(model), True),
            "module_states": {},
            "is_foreign": True,
            "loss_scale": None,
            "small_state": {
                name: {"step": torch.tensor(float(state.steps[name])), IN_COMPONENTS: list(MOMENTS)}
                for name in state.moments
            },
            "world_size": 1,
            "own_states": [],
        },
    }


def _weights(state: ForeignState, model: nn.Module, files: WeightFolder) -> dict[str, Any]:
    parameters, buffers = dict(model.named_parameters()), _persistent(model)
    wanted: Mapping[str, torch.Tensor] = {**parameters, **buffers}
    given = {**state.weights, **state.buffers}
    must = parameters if state.is_whole else state.moments if state.weights else ()
    bare = [name for name in must if name not in state.weights]
    if bare:
        raise ValueError(
            f"the source has weights, but not those of {', '.join(bare[:SHOWN])}; trained weights "
            "are not mixed with others: give the --model that was trained"
        )
    stored = _stored(model, {name for name in wanted if name not in given}, files)
    missing = [name for name in wanted if name not in given and name not in stored]
    if missing:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise ValueError(
            f"neither the state nor {files.path} has {', '.join(missing[:SHOWN])}{more}; give the "
            "folder of the model that was trained as --model"
        )
    return {name: given[name] if name in given else stored[name] for name in wanted}


def _stored(model: nn.Module, names: set[str], files: WeightFolder) -> dict[str, Shelved]:
    """What files have of ``names``, which may be called otherwise there, see ``weight_names``."""
    recipes: dict[str, Recipe] = {}
    found: dict[str, Shelved] = {}
    shelf = Shelf(lambda name: recipes[name].make(files.read)[name])
    like = model.state_dict()
    for recipe in recipes_for(model, names, list(files.names)):
        for name, made in recipe.make(files.on_meta).items():
            if made.shape != like[name].shape:
                raise ValueError(
                    f"{name} has shape {list(made.shape)} in {files.path}, "
                    f"{list(like[name].shape)} in the model"
                )
            is_widened = like[name].dtype.is_floating_point and made.dtype in WIDENED
            dtype = torch.float32 if is_widened else made.dtype
            recipes[name], found[name] = recipe, Shelved(shelf, name, made.shape, dtype)
    return found


def _persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that a state dict has, by their names."""
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}
