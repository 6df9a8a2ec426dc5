"""One step of an ``OffloadedAdamW``: what it depends on, fixed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from infinity.adamw.local_tensors import is_distributed, local
from infinity.adamw.member import Held, Member
from swap.plain import check_memory, is_same_view, memory_fault
from swap.plan.layout import Segment
from swap.plan.rules import ParameterUpdate

Versions: TypeAlias = tuple[int, ...]
"""How often a tensor was changed in place and, of a DTensor, the shard behind it: FSDP2 adds to the
shard of a gradient, of which its DTensor knows nothing.
"""
GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class MemberUpdate:
    """The update of one parameter: where its weights and its gradient are, and the options.

    ``weight`` is flat. ``gradient`` has its dimensions in the order in which the weights lie in
    memory; if it lies in another order itself, it is copied piece by piece.
    """

    member: Member
    weight: torch.Tensor
    gradient: torch.Tensor
    source: torch.Tensor
    versions: Versions
    update: ParameterUpdate
    begins: bool
    """Whether the store holds no values of the parameter yet."""

    def check_gradient(self) -> None:
        """Raises ``RuntimeError`` if the gradient was changed in place since the step was taken."""
        if _versions_of(self.source, self.gradient) != self.versions:
            raise RuntimeError(
                f"the gradient of {self.member.name} was changed before the step that an error had "
                "stopped was finished; load the last checkpoint"
            )
        if (fault := memory_fault(self.gradient)) is not None:
            raise RuntimeError(
                f"the gradient of {self.member.name} {fault}, before the step that an error had "
                "stopped was finished; load the last checkpoint"
            )

    def check_place(self) -> None:
        """Raises ``RuntimeError`` if the weights are not where they were when the step was taken.
        They may be put back there.
        """
        try:
            is_same = is_same_view(self.member.weight(), self.weight)
            why = "is in other memory"
        except (RuntimeError, ValueError) as error:
            is_same, why = False, str(error).removeprefix(f"{self.member.name} ")
        if not is_same:
            raise RuntimeError(
                f"{self.member.name} {why}: the step that an error had stopped has changed a part "
                "of the weights that were there; put these back (parameter.data = ...) and call "
                "optimizer.flush() again, or load the last checkpoint, of the model too"
            )

    def weight_versions(self) -> Versions:
        return _versions_of(self.member.parameter, self.weight)


def makes_state_only(updates: Iterable[MemberUpdate]) -> bool:
    """Whether a step that ``is_asked_by_torch`` is that by which it makes the state of an optimizer
    that has none: the first of all, with learning rates and gradients of zero. Training may begin
    with such a step, too, and it counts.
    """
    return all(
        update.member.held is Held.NOTHING
        and update.update.options["lr"] == 0.0
        and not update.gradient.any()
        for update in updates
    )


def never(_: object) -> bool:
    return False


def is_asked_by_torch() -> bool:
    """Whether a caller is the function of ``torch.distributed.checkpoint.state_dict`` that makes
    state. Nothing else tells its step.
    """
    asking = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code = getattr(getattr(asking, "_init_optim_state", None), "__code__", None)
    frame = sys._getframe() if code is not None else None
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


@dataclass(slots=True, eq=False)
class Step:
    """A step that was taken. ``left`` are the subgroups to be worked on, ``done`` how many
    elements are finished of the segments of those that an error interrupted.

    ``torn`` names a parameter whose state went on and whose weights may not have: nothing can
    finish that step. ``left_weights`` are the versions of all weights when the step was stopped.
    """

    updates: Mapping[int, MemberUpdate]
    left: set[int]
    done: dict[Segment, int] = field(default_factory=dict)
    torn: str | None = None
    left_weights: dict[int, Versions] = field(default_factory=dict)

    def note_stop(self) -> None:
        """From now on nobody else may change its weights."""
        self.left_weights = {n: update.weight_versions() for n, update in self.updates.items()}

    def check_repeatable(self) -> None:
        """Raises ``RuntimeError`` if the step cannot be finished as it was taken."""
        if self.torn is not None:
            raise RuntimeError(
                f"the step was stopped between the state and the weights of {self.torn}; load the "
                "last checkpoint, of the model too"
            )
        for number, update in self.updates.items():
            update.check_gradient()
            update.check_place()
            if update.weight_versions() != self.left_weights[number]:
                raise RuntimeError(
                    f"{update.member.name} was changed before the step that an error had stopped "
                    "was finished: a part of it is from before that step; load the last "
                    "checkpoint, of the model too"
                )


def take(member: Member, options: Mapping[str, Any]) -> MemberUpdate:
    """Fix the update of a parameter that has a gradient. Changes nothing.

    Raises ``RuntimeError`` for a sparse gradient and ``TypeError`` for one of another kind than
    that of its parameter, and ``ValueError`` for one of another shape or whose memory has been
    freed. What the kernel would refuse is refused here.
    """
    source = member.parameter.grad
    assert source is not None
    if source.layout != torch.strided:
        raise RuntimeError(
            f"{member.name} has a sparse gradient, which OffloadedAdamW does not take; make it "
            "dense (sparse=False of nn.Embedding), or use torch.optim.SparseAdam for it"
        )
    _check_placements(member, source)
    gradient = local(source)
    check_memory(f"the gradient of {member.name}", gradient)
    if gradient.dtype not in GRADIENT_DTYPES:
        raise TypeError(f"the gradient of {member.name} is {gradient.dtype}; use float32 at most")
    weight = member.weight()
    if gradient.shape != member.shape:
        raise ValueError(
            f"the gradient of {member.name} has shape {tuple(gradient.shape)}, the parameter has "
            f"{tuple(member.shape)}; give it a gradient of its shape"
        )
    return MemberUpdate(
        member=member,
        weight=weight,
        gradient=gradient.permute(member.layout),
        source=source,
        versions=_versions_of(source, gradient),
        update=ParameterUpdate(
            parameter=member.number, step=member.steps + 1, shape=member.shape, options=options
        ),
        begins=member.held is not Held.VALUES,
    )


def _versions_of(*tensors: torch.Tensor) -> Versions:
    """Nobody counts changes for tensors of the inference mode."""
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def _check_placements(member: Member, gradient: Any) -> None:
    parameter: Any = member.parameter
    same = is_distributed(parameter) == is_distributed(gradient)
    if same and is_distributed(parameter):
        same = parameter.placements == gradient.placements
    if not same:
        raise TypeError(
            f"the gradient of {member.name} is not sharded as the parameter is; redistribute it "
            "to the parameter's placements first"
        )
