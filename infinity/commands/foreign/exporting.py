"""The optimizer state of a checkpoint as a file that ``torch.optim.AdamW`` loads.

The file is laid out first, without the bytes of its tensors (``torch.serialization.skip_data``),
which then are streamed to their places: no more than the staging of a load is ever in memory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

import checkpoint
from aio.errors import naming
from checkpoint.directory.files.replacing import Replacement
from checkpoint.directory.relocation import StripeDirs
from infinity.commands.foreign.state import MOMENTS
from infinity.optim.adamw import NAME, is_torch_adamw
from infinity.values.load_targets import literal
from infinity.values.saved_state import leaf_of, with_steps_of_tiles
from swap.storage.components import as_bytes

OPTIONS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""What groups of torch's AdamW have besides, as it makes them."""
_AS_OURS = {"fused": True}
"""What those of our AdamW have: the arithmetic with the bits of ours in float32."""
AMSGRAD = "max_exp_avg_sq"
_OURS = ("params", "param_names", "decoupled")


class _Place:
    """One tensor of the file, as a ``ByteSink``."""

    thread_safe = True

    def __init__(self, descriptor: int, like: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(like.shape), like.dtype
        self._descriptor = descriptor
        storage: Any = like.untyped_storage()
        self._offset: int = storage._checkpoint_offset

    def write(self, start: int, data: memoryview) -> None:
        while data:
            written = os.pwrite(self._descriptor, data, self._offset + start)
            start, data = start + written, data[written:]


def check_exportable(
    path: str | os.PathLike[str],
    file: Path,
    stripe_dirs: StripeDirs | None = None,
    *,
    folder: Path | None = None,
) -> None:
    """Raises what ``export_optimizer`` would, before anything is written; and ``ValueError`` for a
    file that is one of the checkpoint, or of the weights that are exported to ``folder``.
    """
    try:
        place = file.resolve()
    except RuntimeError as error:  # before Python 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(file)) from error
    if Path(path).resolve() in place.parents:
        raise ValueError(f"{file} would be among the files of the checkpoint {path}; give another")
    is_weights = place.name.endswith((".safetensors", ".safetensors.index.json"))
    if folder is not None and place.parent == folder.resolve() and is_weights:
        raise ValueError(f"{file} would be among the weights exported to {folder}; give another")
    if not file.parent.is_dir() or (file.exists() and not file.is_file()):
        raise FileNotFoundError(f"{file}: give a file in a folder that exists")
    _with_moments(_training_of(path, stripe_dirs), path)


def _training_of(path: str | os.PathLike[str], stripe_dirs: StripeDirs | None) -> Mapping[str, Any]:
    """What a checkpoint says of training, without moments."""
    names = checkpoint.list_tensors(path)
    if not any(name.startswith("infinity.") for name in names):
        raise ValueError(
            f"{path} is of no offloaded model, and has no optimizer state to export: leave "
            "--optimizer out for its tensors alone"
        )
    saved: Mapping[str, Any] = checkpoint.load(path, only=["infinity.*"], stripe_dirs=stripe_dirs)
    found: Mapping[str, Any] = saved["infinity"]
    return found


def export_optimizer(
    path: str | os.PathLike[str], file: Path, stripe_dirs: StripeDirs | None = None
) -> Path:
    """Write ``file``, durably and at once: until it is whole it has another name.

    Parameters have the numbers of their places in the groups, and their names in ``param_names``.
    Raises ``ValueError`` for a checkpoint without the moments of AdamW in 16 bits or more, and
    ``OSError`` naming the file.
    """
    check_exportable(path, file, stripe_dirs)
    saved = _training_of(path, stripe_dirs)
    names = _with_moments(saved, path)
    with FakeTensorMode():
        state = _state_dict(saved, names)
    with naming(file):
        replacement = Replacement(file.resolve())  # of its own: another export may write this, too
        try:
            _lay_out(state, replacement.temporary)
            _fill(replacement, saved, path, stripe_dirs)
            replacement.commit()
        finally:
            replacement.discard()
    return file


def _lay_out(state: Mapping[str, Any], file: Path) -> None:
    """Write the file but for the bytes of its tensors."""
    # Through a file of Python's: torch's own has no errno, and puts the file's name inside.
    skipping = torch.serialization.skip_data(materialize_fake_tensors=True)
    with file.open("wb") as opened, skipping:
        torch.save(state, opened)


def parameters_for(
    path: str | os.PathLike[str], stripe_dirs: StripeDirs | None = None
) -> str | None:
    """What to say of the parameters that an optimizer is to have which loads the file: not all of
    the model's in one group and in their order; None where it is those.
    """
    saved = _training_of(path, stripe_dirs)
    members = _members(saved)
    count, known = sum(map(len, members)), [*saved["steps"]]
    if members == [known]:
        return None
    return (
        f"for an optimizer with {count} of the {len(known)} parameters, in {len(members)} group(s) "
        "of the order that param_names in the file has; where one group has those that are not "
        "frozen: torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)"
    )


def _with_moments(saved: Mapping[str, Any], path: str | os.PathLike[str]) -> list[str]:
    """The parameters that have state."""
    kept_by = saved["optimizer_class"]
    if kept_by != NAME and not (kept_by and is_torch_adamw(kept_by)):
        raise ValueError(f"{path} has the state of {kept_by}, not of AdamW")
    if saved.get("state_dtype", torch.float32) == torch.uint8:
        raise ValueError(
            f"{path} has moments of 8 bits, which torch.optim.AdamW does not have; train with "
            "state_dtype=torch.bfloat16 or torch.float32 to export them"
        )
    for name in with_steps_of_tiles(saved):
        raise ValueError(
            f"{path} has tiles of {name} that have taken different numbers of steps, and "
            "torch.optim.AdamW has one for a parameter; leave --optimizer out for the weights alone"
        )
    return [name for name, components in saved["planes"].items() if {*MOMENTS} <= {*components}]


def _members(saved: Mapping[str, Any]) -> list[list[str]]:
    """The parameters of each group; the tiles of one are that one."""
    return [
        list(dict.fromkeys(leaf_of(name, saved) for name in group["params"]))
        for group in saved["groups"]
    ]


def _parts(saved: Mapping[str, Any], name: str) -> list[str]:
    return [part for part in (*MOMENTS, AMSGRAD) if part in saved["planes"][name]]


def _state_dict(saved: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """What ``AdamW.state_dict()`` would be, without the values of its tensors."""
    groups, members = saved["groups"], _members(saved)
    numbers = {name: i for i, name in enumerate(chain.from_iterable(members))}
    return {
        "state": {
            numbers[name]: {
                "step": torch.empty((), dtype=torch.float32),
                **{
                    part: torch.empty(saved["shapes"][name], dtype=_dtype(saved, name, part))
                    for part in _parts(saved, name)
                },
            }
            for name in names
            if saved["steps"][name]
        },
        "param_groups": [
            OPTIONS
            | (_AS_OURS if saved["optimizer_class"] == NAME else {})
            | tree_map(_laid_out, _options(group))
            | {
                "params": [numbers[name] for name in own],
                "param_names": own,
            }
            for group, own in zip(groups, members, strict=True)
        ],
    }


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OURS}


def _laid_out(option: Any) -> Any:
    """A tensor without its values, in memory of its own."""
    is_tensor = isinstance(option, torch.Tensor)
    return torch.empty(option.shape, dtype=option.dtype) if is_tensor else option


def _dtype(saved: Mapping[str, Any], name: str, part: str) -> torch.dtype:
    named = saved.get("plane_dtypes", {}).get(name, {}).get(part)
    found: torch.dtype = named or saved.get("state_dtype", torch.float32)
    return found


def _fill(
    replacement: Replacement,
    saved: Mapping[str, Any],
    path: str | os.PathLike[str],
    stripe_dirs: StripeDirs | None,
) -> None:
    """Stream every tensor to its place in the file."""
    with FakeTensorMode():
        laid_out = torch.load(replacement.temporary, weights_only=True)
    names = {
        number: name
        for group in laid_out["param_groups"]
        for number, name in zip(group["params"], group["param_names"], strict=True)
    }
    descriptor = os.open(replacement.temporary, os.O_RDWR | os.O_CLOEXEC)
    try:
        for group, laid in zip(saved["groups"], laid_out["param_groups"], strict=True):
            for key, option in _options(group).items():
                _fill_option(descriptor, laid[key], option)
        into: dict[str, dict[str, Any]] = {}
        for number, kept in laid_out["state"].items():
            name = names[number]
            steps = torch.tensor(float(saved["steps"][name])).numpy().data.cast("B")
            _Place(descriptor, kept["step"]).write(0, steps)
            for part in _parts(saved, name):
                into.setdefault(part, {})[name] = _Place(descriptor, kept[part])
        if laid_out["state"]:
            wanted = [f"optimizer.{part}.{literal(n)}" for part in into for n in into[part]]
            checkpoint.load(path, only=wanted, into={"optimizer": into}, stripe_dirs=stripe_dirs)
        replacement.give_attributes()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fill_option(descriptor: int, laid_out: Any, option: Any) -> None:
    """Write the values of tensors in an option of a group, such as a rate that is one."""
    for like, value in zip(tree_leaves(laid_out), tree_leaves(option), strict=True):
        if isinstance(value, torch.Tensor):
            _Place(descriptor, like).write(0, as_bytes(value.contiguous().reshape(-1)).data)
