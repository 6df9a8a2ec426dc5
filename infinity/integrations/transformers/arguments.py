"""Options of ``infinity.offload`` beside those of a trainer: as fields of its arguments, which
``HfArgumentParser`` reads from a command line, or as keyword arguments of the trainer itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import TrainingArguments

from infinity.activations.tiers import mode_of
from infinity.integrations.takeover import OffloadOptions

_REMEDY = (
    "give the trainer nvme='/path/on/an/ssd' (or a list with one directory for each SSD), or use "
    "OffloadArguments(nvme=...) as its args"
)


@dataclass
class OffloadArgumentsMixin:
    """The fields that any class of training arguments gets by inheriting from this one first::

        class SFTOffloadConfig(OffloadArgumentsMixin, SFTConfig): ...

    Subclasses become dataclasses by themselves. Numbers of bytes are ints or text such as
    ``"8GiB"``, dtypes are those of torch or their names. Raises ``ValueError`` for a name that is
    no dtype and an unknown mode.
    """

    nvme: list[str] | None = field(
        default=None,
        metadata={"help": "A directory for swap files, or one for each SSD."},
    )
    host_memory: str | None = field(
        default=None,
        metadata={"help": "Most host memory the library takes, such as 8GiB. Half of what is free"},
    )
    device_memory: str | None = field(
        default=None,
        metadata={"help": "Most memory of weights on the compute device, such as 4GiB."},
    )
    compute_dtype: str | None = field(
        default=None,
        metadata={"help": "Dtype of weights and gradients, such as bfloat16. As they are."},
    )
    state_dtype: str = field(
        default="float32",
        metadata={"help": "Dtype of the moments of AdamW: float32, bfloat16 or uint8."},
    )
    activations: str = field(
        default="keep",
        metadata={"help": "Where saved tensors go: keep, host or nvme."},
    )
    max_parameter_bytes: str | None = field(
        default=None,
        metadata={"help": "Cut the weights of larger layers, embeddings and experts into tiles."},
    )
    weights: str | None = field(
        default=None,
        metadata={"help": "Safetensors file or folder that the values of the model come from."},
    )
    verify_swap: bool = field(
        default=False,
        metadata={"help": "Compare what is read from swap files with what was written there."},
    )

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclass(cls)

    def __post_init__(self) -> None:
        above = getattr(super(), "__post_init__", None)
        if above is not None:
            above()
        # Trainers write their arguments as JSON, which knows neither paths nor dtypes.
        if self.nvme is not None:
            self.nvme = [os.fspath(directory) for directory in _listed(self.nvme)]
        self.compute_dtype = name_of_dtype("compute_dtype", self.compute_dtype)
        self.state_dtype = name_of_dtype("state_dtype", self.state_dtype) or "float32"
        if self.weights is not None:
            self.weights = os.fspath(self.weights)
        mode_of(self.activations)


@dataclass
class OffloadArguments(OffloadArgumentsMixin, TrainingArguments):
    """``transformers.TrainingArguments`` with the options of ``infinity.offload``."""


NAMES = tuple(option.name for option in fields(OffloadOptions))


def options_of(arguments: object, given: Mapping[str, Any]) -> OffloadOptions:
    """From keyword arguments of a trainer and, where those have nothing, its ``args``.

    Raises ``ValueError`` where neither says where state is to go.
    """
    defaults = {option.name: option.default for option in fields(OffloadArgumentsMixin)}
    values = {name: given.get(name, getattr(arguments, name, defaults[name])) for name in NAMES}
    if not values["nvme"]:
        raise ValueError(f"nvme is missing: {_REMEDY}")
    values["nvme"] = _listed(values["nvme"])
    mode_of(values["activations"])
    for name in ("compute_dtype", "state_dtype"):
        text = name_of_dtype(name, values[name])
        values[name] = None if text is None else getattr(torch, text)
    return OffloadOptions(**values)


def _listed(nvme: Any) -> list[Any]:
    return [nvme] if isinstance(nvme, (str, os.PathLike)) else list(_sequence(nvme))


def _sequence(nvme: Any) -> Sequence[Any]:
    if not isinstance(nvme, Sequence):
        raise TypeError(f"nvme={nvme!r} is neither a path nor a sequence of paths")
    return nvme


def name_of_dtype(option: str, dtype: Any) -> str | None:
    """``"bfloat16"`` of ``torch.bfloat16``, ``"torch.bfloat16"``, ``"bf16"`` or itself."""
    if dtype is None:
        return None
    text = str(dtype).removeprefix("torch.")
    text = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(text, text)
    if not isinstance(getattr(torch, text, None), torch.dtype):
        raise ValueError(f"{option}={dtype!r} is no dtype of torch; give one such as 'bfloat16'")
    return text
