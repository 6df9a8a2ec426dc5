"""DeepSpeed's universal checkpoints, which its `ds_to_universal.py` makes of those of ZeRO.

`zero/<parameter>/` has `fp32.pt` (the master), `exp_avg.pt`, `exp_avg_sq.pt` and `step.pt`: tensors
as they are or flat, alone or as `param` of a dict. Which parameters were in which group they do not
say.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.commands.foreign.state import (
    MOMENTS,
    WIDENED,
    ForeignState,
    as_float32,
    check_dense,
    check_dtype,
    check_kept,
    step_count,
)
from infinity.commands.foreign.torch_files import load_mapped

LATEST = "latest_universal"
MASTER = "fp32"
_WRAPPED = "module."


def universal_folder(path: Path) -> Path | None:
    """The folder `zero` of a checkpoint at ``path``, or of the latest one in it."""
    for folder in (path, path / _latest(path)):
        if (folder / "zero").is_dir():
            return folder / "zero"
    return None


def _latest(path: Path) -> str:
    try:
        return (path / LATEST).read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def read_universal(folder: Path, model: nn.Module) -> ForeignState:
    """``folder``: what ``universal_folder`` gives. Raises ``ValueError`` naming what is missing."""
    weights, moments, steps = {}, {}, {}
    own = {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        where = _place(folder, name)
        if where is None:
            continue  # frozen: DeepSpeed keeps those elsewhere
        weights[name] = _tensor(where / f"{MASTER}.pt", parameter)
        if kept := {file.stem for file in where.glob("*.pt")} - {MASTER}:
            check_kept(kept | {"step"}, name, folder)
            first, second = (_tensor(where / f"{part}.pt", parameter) for part in MOMENTS)
            moments[name] = (first, second)
            steps[name] = _step(where / "step.pt", folder)
    there = {where.name for where in folder.iterdir() if where.is_dir()}
    others = sorted(n for n in there if n not in own and n.removeprefix(_WRAPPED) not in own)
    return ForeignState(weights=weights, moments=moments, steps=steps, others=others)


def _place(folder: Path, name: str) -> Path | None:
    for called in (name, _WRAPPED + name):
        if (folder / called).is_dir():
            return folder / called
    return None


def _tensor(file: Path, parameter: nn.Parameter) -> Any:
    found = load_mapped(file)
    if isinstance(found, Mapping):
        found = found.get("param")
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"{file} has no tensor, alone or as `param` of a dict")
    check_dtype(found.dtype, "a tensor", file, *WIDENED)
    check_dense(found, "a tensor", file)
    if found.dim() == 1 and found.numel() == parameter.numel():
        found = found.view(parameter.shape)
    return as_float32(found)


def _step(file: Path, folder: Path) -> int:
    """Of a parameter, or where it has none of its own, of all."""
    for where in (file, folder / "optimizer_state.pt"):
        if where.exists():
            found = load_mapped(where)
            if isinstance(found, Mapping):
                found = found.get("step")
            if found is not None:
                return step_count(found, "its step", where)
    raise ValueError(f"{file} is missing: how many steps the moments are from is not known")
