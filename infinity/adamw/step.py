"""One step of an ``OffloadedAdamW``: what it depends on, fixed, and how it changes a parameter."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity.adamw.local_tensors import copy_elements, is_distributed, local
from infinity.adamw.member import Held, Member
from swap.plain import check_memory, is_plain, plain
from swap.plan.layout import Segment
from swap.plan.rules import ParameterUpdate, UpdateRule

_COMPARED_ELEMENTS = 32 * 1024
"""Of a master and its weights at once, by copies that leave no holes in the heap."""
TRANSFER_ELEMENTS = 256 * 1024
"""Elements of weights and gradients that are brought to the host at once from another device."""
TRANSFER_BYTES = TRANSFER_ELEMENTS * (4 + 4)
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
    version: int
    update: ParameterUpdate
    begins: bool
    """Whether the store holds no values of the parameter yet."""

    def check_unchanged(self) -> None:
        """Raises ``RuntimeError`` if the gradient was changed in place since the step was taken."""
        if _version_of(self.source) != self.version:
            raise RuntimeError(
                f"the gradient of {self.member.name} was changed before the step that an error had "
                "stopped was finished; load the last checkpoint"
            )


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
    finish that step.
    """

    updates: Mapping[int, MemberUpdate]
    left: set[int]
    done: dict[Segment, int] = field(default_factory=dict)
    torn: str | None = None

    def check_repeatable(self) -> None:
        """Raises ``RuntimeError`` if the step cannot be finished as it was taken."""
        if self.torn is not None:
            raise RuntimeError(
                f"the step was stopped between the state and the weights of {self.torn}; load the "
                "last checkpoint, of the model too"
            )
        for update in self.updates.values():
            update.check_unchanged()


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
        version=_version_of(source),
        update=ParameterUpdate(
            parameter=member.number, step=member.steps + 1, shape=member.shape, options=options
        ),
        begins=member.held is not Held.VALUES,
    )


def _version_of(tensor: torch.Tensor) -> int:
    """How often it was changed in place, which nobody counts for tensors of the inference mode."""
    return 0 if tensor.is_inference() else tensor._version


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


class Updater:
    """Applies a rule to weights wherever they are; those of another device in pieces by way of
    two buffers on the host.
    """

    def __init__(self, rule: UpdateRule) -> None:
        self._rule = rule
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._ordered: torch.Tensor | None = None

    def end_step(self) -> None:
        """Give back what a step takes for gradients that lie in another order."""
        self._ordered = None

    def work(
        self, step: Step, segments: Sequence[Segment], components: Mapping[str, torch.Tensor]
    ) -> None:
        """Update every segment of a subgroup that has an update, from where it was stopped."""
        for segment in segments:
            update = step.updates.get(segment.parameter)
            if update is None:
                continue
            stop = segment.offset + segment.length
            mine = {
                name: component[segment.offset : stop] for name, component in components.items()
            }
            for piece in _pieces(segment, update):
                if piece.start >= step.done.get(segment, 0):
                    here = {name: component[piece] for name, component in mine.items()}
                    self._piece(step, segment, update, piece, here)
                    step.done[segment] = piece.stop

    def _piece(
        self,
        step: Step,
        segment: Segment,
        update: MemberUpdate,
        piece: slice,
        components: dict[str, torch.Tensor],
    ) -> None:
        """All or, where it raises, nothing that matters to a second try; else ``step`` is torn."""
        part = slice(segment.start + piece.start, segment.start + piece.stop)
        weight = update.weight[part]
        here = self._on_host(0, weight)
        gradient = self._gradient(update.gradient, part)
        if update.begins:
            for component in components.values():
                component.zero_()
        if "master" in components:
            follow_weight(components["master"], here)
        self._rule.apply(segment, update.update, components | {"weight": here}, gradient, 1.0)
        if here is not weight:
            step.torn = update.member.name
            weight.copy_(here)
            step.torn = None

    def _gradient(self, gradient: torch.Tensor, part: slice) -> torch.Tensor:
        """Those of its elements, on the host."""
        if gradient.is_contiguous():
            return self._on_host(1, gradient.view(-1)[part])
        if self._ordered is None:  # one for all: many would leave holes in the heap
            self._ordered = torch.empty(TRANSFER_ELEMENTS * 4, dtype=torch.uint8, device="cpu")
        out = self._ordered.view(gradient.dtype)[: part.stop - part.start]
        copy_elements(gradient, part.start, out)
        return out

    def _on_host(self, which: int, values: torch.Tensor) -> torch.Tensor:
        """``values`` themselves, or a copy on the host whose bytes are the values."""
        if values.device.type == "cpu":
            return plain(values)
        if self._buffers is None:
            nbytes = TRANSFER_ELEMENTS * 4
            self._buffers = (
                torch.empty(nbytes, dtype=torch.uint8, device="cpu"),
                torch.empty(nbytes, dtype=torch.uint8, device="cpu"),
            )
        buffer = self._buffers[which].view(values.dtype)[: values.numel()]
        buffer.copy_(values)
        return buffer


def _pieces(segment: Segment, update: MemberUpdate) -> Iterator[slice]:
    """Of its elements: all at once where nothing is copied. Copies are smaller than what saves are
    staged in, which is free during a step.
    """
    gradient = update.gradient
    is_copied = not (_is_plain_on_host(update.weight) and _is_plain_on_host(gradient))
    is_copied = is_copied or not gradient.is_contiguous()
    size = TRANSFER_ELEMENTS if is_copied else segment.length
    for start in range(0, segment.length, max(1, size)):
        yield slice(start, min(start + size, segment.length))


def _is_plain_on_host(values: torch.Tensor) -> bool:
    return values.device.type == "cpu" and is_plain(values)


def follow_weight(master: torch.Tensor, weight: torch.Tensor) -> None:
    """Set the elements of ``master`` whose weights were changed by somebody else, exactly.

    The others keep what the master has beyond the weights.
    """
    for start in range(0, len(master), _COMPARED_ELEMENTS):
        part = slice(start, start + _COMPARED_ELEMENTS)
        ours, theirs = master[part], weight[part]
        changed = ours.to(theirs.dtype).view(torch.int16) != theirs.view(torch.int16)
        torch.where(changed, theirs.to(ours.dtype), ours, out=ours)
