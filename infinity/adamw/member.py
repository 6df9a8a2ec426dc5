"""What an ``OffloadedAdamW`` knows of one parameter, and of the options of its group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from infinity.adamw.local_tensors import Layout, flat, layout_of, local
from infinity.adamw.names import names_of
from infinity.optim.adamw import UNKNOWN_OPTIONS, AdamW, check_options
from swap.plain import check_memory
from swap.plan.layout import ParameterSpec

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Held(Enum):
    """What the room of a parameter in the store holds. It goes on from one to a later one, and back
    to NOTHING when a state without the parameter is loaded.
    """

    NOTHING = 0
    """Anything: there is no state yet."""
    ZEROS = 1
    """Anything; there is a state, that of before the first step, which is zeros."""
    VALUES = 2

    @property
    def is_state(self) -> bool:
        """Whether the parameter has a state."""
        return self is not Held.NOTHING


@dataclass(slots=True, eq=False)
class Member:
    """A parameter that has room for its state in the store, as parameter ``number``.

    ``shape``, ``layout``, ``dtype`` and ``device`` are those of the local tensor when it got it.
    """

    parameter: torch.Tensor
    name: str
    number: int
    shape: torch.Size
    layout: Layout
    dtype: torch.dtype
    device: torch.device
    steps: int = 0
    held: Held = Held.NOTHING

    def weight(self) -> torch.Tensor:
        """The weights, flat, in place. Raises ``RuntimeError`` if they are not what they were."""
        tensor = local(self.parameter)
        before = (self.shape, self.dtype, self.device, self.layout)
        now = (tensor.shape, tensor.dtype, tensor.device, layout_of(tensor))
        if now != before:
            raise RuntimeError(
                f"{self.name} was {_described(*before)} when the optimizer was made, and is "
                f"{_described(*now)} now; convert and move a model before making its "
                "optimizer, also to another memory_format"
            )
        check_memory(self.name, tensor)
        return flat(tensor, self.layout)


def _described(shape: torch.Size, dtype: torch.dtype, device: torch.device, layout: Layout) -> str:
    in_order = layout == tuple(range(len(layout)))
    order = "" if in_order else f" with its dimensions in memory in the order {layout}"
    return f"{dtype} on {device}, shape {tuple(shape)}{order},"


_NEEDED = ("lr", "betas", "eps", "weight_decay")
_KNOWN = (*_NEEDED, "maximize", "decoupled_weight_decay", *UNKNOWN_OPTIONS)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group as they are now.

    Raises ``ValueError`` for one that is missing, out of range, or asks for what is not computed.
    """
    missing = [name for name in _NEEDED if name not in group]
    if missing:
        raise ValueError(f"a parameter group has no {' and no '.join(missing)}, as AdamW's have")
    needed = {name: group[name] for name in _NEEDED}
    try:
        AdamW(**needed)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"the options {needed} of a parameter group: {error}") from error
    options = {name: group[name] for name in _KNOWN if name in group}
    check_options(options)
    return options | {"lr": float(options["lr"])}


def check_distinct(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ``ValueError`` for a parameter that is several times in ``groups``: torch steps it as
    often.
    """
    seen: set[int] = set()
    for parameter in (parameter for group in groups for parameter in group["params"]):
        if id(parameter) in seen:
            raise ValueError(
                f"parameter {names_of(groups)[id(parameter)]} is several times in the parameter "
                "groups; give each parameter once"
            )
        seen.add(id(parameter))


def check_same_decay(
    theirs: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]]
) -> None:
    """Raises ``ValueError`` for groups of a state dict that would turn AdamW into Adam, or back."""
    name = "decoupled_weight_decay"
    for number, groups in enumerate(zip(theirs, ours, strict=False)):
        their, our = (bool(group.get(name, True)) for group in groups)
        if their != our:
            raise ValueError(
                f"parameter group {number} of the state dict has {name}={their} and the optimizer "
                f"{our}: one is Adam's and the other AdamW's; set it in the groups of either first"
            )


def defaults_of(**options: Any) -> dict[str, Any]:
    """What groups of torch's AdamW have, so that state dicts have the same entries, with
    ``options``, checked. They are no copies: who has the tensor of a learning rate may write the
    next one into it.
    """
    AdamW(**options)
    return torch.optim.AdamW([torch.zeros(1)]).defaults | options


def member_of(parameter: torch.Tensor, name: str, number: int) -> Member:
    tensor = local(parameter)
    if tensor.is_meta:
        raise ValueError(
            f"parameter {name} is on the meta device; make an optimizer of real parameters, or "
            "use infinity.offload"
        )
    if tensor.layout != torch.strided:
        raise ValueError(
            f"parameter {name} is {tensor.layout}, which OffloadedAdamW does not update: make it "
            "dense with .to_dense(), or give it to another optimizer"
        )
    if tensor.dtype not in WEIGHT_DTYPES:
        raise ValueError(
            f"parameter {name} is {tensor.dtype}; OffloadedAdamW updates float32, bfloat16 and "
            "float16: convert it, or give it to another optimizer"
        )
    return Member(
        parameter=parameter,
        name=name,
        number=number,
        shape=tensor.shape,
        layout=layout_of(tensor),
        dtype=tensor.dtype,
        device=tensor.device,
    )


def spec_of(member: Member, index: int) -> ParameterSpec:
    return ParameterSpec(
        index=index,
        name=member.name,
        numel=member.shape.numel(),
        dtype=member.dtype,
        trainable=True,
        state_only=True,
    )
