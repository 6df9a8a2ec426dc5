"""The model that ``infinity plan`` is asked about: a number of parameters, a folder with a
``config.json`` of transformers, or files of safetensors. None takes memory: all is on meta.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.values.initial.weight_files import INDEX, WeightFolder

CONFIG = "config.json"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_DEEPEST = 100
"""Modules that the name of a tensor goes through, at most."""
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


class UsageError(ValueError):
    """Arguments that make no sense, alone or together."""


@dataclass(frozen=True, slots=True)
class Source:
    """What is planned for: a model, or the number of parameters of one; and a line about it."""

    model: nn.Module | int
    text: str


def source_of(text: str, dtype: torch.dtype | None) -> Source:
    """A path if there is something at it, else a number. ``dtype`` in place of the model's own.

    Raises ``ValueError`` for what is neither, or no model, ``OSError`` for what cannot be read.
    """
    path = Path(text)
    if text and path.exists():
        return _of_config(path, dtype) if has_config(path) else _of_weights(path, dtype)
    count = count_of(text)
    return Source(count, f"a transformer of {count:,} parameters in {_name(dtype or DEFAULT)}")


DEFAULT = torch.bfloat16
"""Of a number of parameters, which says nothing about their dtype."""


def count_of(text: str) -> int:
    """A number of parameters: 7e9, 7B, 350M, 7_000_000_000. Raises ``UsageError``."""
    digits = text.strip().rstrip("".join(_COUNTS) + "".join(_COUNTS).lower())
    unit = text.strip()[len(digits) :].upper()
    try:
        whole = digits.replace("_", "").isdecimal()
        found = int((int(digits) if whole else float(digits)) * _COUNTS[unit])
    except (KeyError, ValueError, OverflowError):
        found = 0
    if found < 1:
        raise UsageError(
            f"{text!r} is not a number of parameters, nor is there anything at that path; write "
            f"7e9, 7B or 350M, or give a folder with a {CONFIG} or a file of safetensors"
        )
    return found


def has_config(path: Path) -> bool:
    """Whether transformers can make the model of ``path``, with its own order of parameters."""
    return path.name == CONFIG if path.is_file() else (path / CONFIG).is_file()


def _of_config(path: Path, dtype: torch.dtype | None) -> Source:
    folder = path.parent if path.is_file() else path
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"{folder / CONFIG} is read by transformers, which is not installed: `pip install "
            "transformers`, or give the safetensors file or a number of parameters"
        ) from error
    try:
        config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        names = getattr(config, "architectures", None) or [None]
        built: Any = getattr(transformers, names[0] or "", transformers.AutoModel)
        make = built.from_config if built is transformers.AutoModel else built._from_config
        used = dtype or getattr(config, "dtype", None) or torch.float32
        with torch.device("meta"):
            model: nn.Module = make(config, dtype=used)
    except Exception as error:  # of whatever kind: the text of a file decides what is called
        raise ValueError(
            f"{folder / CONFIG} describes no model that transformers {transformers.__version__} "
            f"can build: {type(error).__name__}: {error}"
        ) from error
    return Source(model, f"{type(model).__name__} of {folder} in {_name(used)}")


def _of_weights(path: Path, dtype: torch.dtype | None) -> Source:
    if path.is_dir() and not any(path.glob("*.safetensors")) and not (path / INDEX).is_file():
        raise ValueError(
            f"{path} has neither a {CONFIG} nor a file of safetensors; give such a folder or file, "
            "or a number of parameters such as 7B"
        )
    files = WeightFolder(path)
    root = nn.Module()
    for name in files.names:
        if name.count(".") > _DEEPEST:
            raise ValueError(
                f"{path} names a tensor in {name.count('.')} modules, one in the other: "
                f"{name[:40]}...; a model has at most {_DEEPEST}"
            )
        _put(root, name.split("."), files.on_meta(name), dtype)
    files.close()
    found = sorted({_name(p.dtype) for p in root.parameters()})
    if not found:
        raise ValueError(f"{path} has no tensor of floats: nothing in it can be trained")
    return Source(_stacked(root), f"the tensors of {path} in {', '.join(found)}")


def _put(
    module: nn.Module, keys: list[str], tensor: torch.Tensor, dtype: torch.dtype | None
) -> None:
    """A tensor at its place in modules named as the files name them. Files may name them as methods
    of a module, by nothing, or a tensor as a module: names that torch gives none.
    """
    for key in keys[:-1]:
        inner = module._modules.get(key)
        if inner is None:
            inner = module._modules[key] = nn.Module()
        module = inner
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
        module._parameters[keys[-1]] = nn.Parameter(tensor.to(dtype or tensor.dtype))
    else:
        module._buffers[keys[-1]] = tensor


def _stacked(module: nn.Module) -> nn.Module:
    """Children that are numbered, as a ModuleList: they are the blocks of a model. Their numbers
    stay: those of a Sequential lack the modules without tensors.
    """
    for name, child in list(module.named_children()):
        module._modules[name] = _stacked(child)
    children = dict(module.named_children())
    if children and not module._parameters and all(name.isdecimal() for name in children):
        blocks = nn.ModuleList()
        blocks._buffers.update(module._buffers)
        for name in sorted(children, key=int):
            blocks._modules[name] = children[name]
        return blocks
    return module


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
