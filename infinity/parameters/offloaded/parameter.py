"""The face of a parameter while its bytes are elsewhere.

A parameter keeps its identity, shape and dtype; only its data is swapped for a *placeholder* (see
``placeholders``). It has then the class ``AbsentParameter``: an operation on it that is not about
metadata has the weights fetched for as long as it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from infinity.parameters.offloaded.assigned import assigned, expect_gradients
from infinity.parameters.offloaded.changes import (
    CopyOwner,
    copy_of,
    wait_for,
    weight_changes,
    writes_later,
)
from infinity.parameters.offloaded.differentiated import PASSES, by_edges, is_by_inputs_alone
from infinity.parameters.offloaded.gradient import GradientOwner, OffloadedGradient
from infinity.parameters.offloaded.modes import outside_inference
from infinity.parameters.offloaded.placeholders import (
    ABOUT_PARAMETERS,
    came_frozen,
    is_mapped,
    is_placeholder,
    lender_of,
    placeholder,
    refusal_of_gradient,
    refuse,
    serve_placeholders,
    storage_of,
)

_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad


class Owner(GradientOwner, CopyOwner, Protocol):
    """Who knows the weights and gradients of offloaded parameters."""

    def has_gradient(self, index: int) -> bool:
        """Whether the parameter has one that was not cleared."""

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        """Replace or clear it."""

    def in_place(self, indices: Collection[int]) -> AbstractContextManager[None]:
        """Weights of these parameters are in place inside."""

    @property
    def is_computing(self) -> bool:
        """Whether a forward pass of the model runs on this thread."""

    def is_gathered(self, index: int) -> bool:
        """Whether the parameter holds a tensor that is the program's to change."""

    def gave_view(self, index: int, view: torch.Tensor) -> None:
        """A program has got this view with a history, which lies in the weights of the moment."""

    def watch_gradients(self, index: int) -> None:
        """From now on autograd may bring some to a parameter that came frozen. Idempotent."""


class OffloadedParameter(nn.Parameter):
    """Class that a parameter has inside the block. Its gradient is not a tensor of its own: see
    ``grad``.
    """

    is_offloaded = True
    offload_index: int
    offload_trainable: bool
    offload_owner: Owner

    @property
    def grad(self) -> torch.Tensor | None:
        """None, or what stands for the gradient and reads it when it is used, see ``gradient``.

        To a hook that was on the parameter before the block, it is what has just arrived.
        """
        arriving: torch.Tensor | None = _GRAD.__get__(self)
        if arriving is not None:
            return arriving
        if not self.offload_owner.has_gradient(self.offload_index):
            return None
        return OffloadedGradient.of(self.offload_owner, self.offload_index, self._face)

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        own = self.offload_owner, self.offload_index
        if isinstance(gradient, OffloadedGradient) and gradient.stands_for(*own):
            return gradient.becomes_it()  # ``p.grad += x`` has changed it already
        if gradient is not None:
            if not self.offload_trainable:
                raise came_frozen(self._name, "cannot be given a gradient")
            gradient = assigned(self._name, self, gradient)
        is_arriving = _GRAD.__get__(self) is not None
        _GRAD.__set__(self, gradient if is_arriving else None)
        if not is_arriving or gradient is None:  # what arrives joins those that came before it
            self.offload_owner.set_gradient(self.offload_index, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> torch.Tensor:
        """The weights, as ``detach()`` gives them: outside of forward passes a copy.

        Unlike that of other parameters it shares their version, so that a change made through it is
        noticed and does not get lost, unless torch does not count it: collectives change the copy.
        """
        return self.detach()

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        if not self.offload_owner.is_gathered(self.offload_index):
            raise RuntimeError(
                f"the data of {self._name}, which is offloaded, cannot be replaced; change its "
                "values inside `with offloaded.gathered([parameter], modify=True):`"
            )
        if data.shape != self.shape:
            raise RuntimeError(
                f"{self._name} has shape {tuple(self.shape)} while it is offloaded and cannot "
                f"become {tuple(data.shape)}; resize it (resize_token_embeddings does) before the "
                "block"
            )
        _DATA.__set__(self, data)
        # Unlike a change in place, this leaves the version as it is.
        torch.autograd.graph.increment_version(self)

    @property
    def _face(self) -> torch.Tensor:
        """Without memory, as the parameter is."""
        with torch._C.DisableTorchFunctionSubclass():
            refusal = refusal_of_gradient(self._name)
            return placeholder(self.shape, self.dtype, self.device, refusal)

    @property
    def _name(self) -> str:
        return self.offload_owner.name_of(self.offload_index)

    @property
    def requires_grad(self) -> bool:
        """As ever: what came in frozen can be flagged, and used where no gradients are computed
        (adapters of PEFT are, when one is made active). It has no optimizer state, and a gradient
        that arrives there is refused.
        """
        required: bool = _REQUIRES_GRAD.__get__(self)
        return required

    @requires_grad.setter
    def requires_grad(self, required: bool) -> None:
        _REQUIRES_GRAD.__set__(self, required)
        if required and not self.offload_trainable:
            expect_gradients(self)

    def requires_grad_(self, requires_grad: bool = True) -> OffloadedParameter:
        self.requires_grad = requires_grad
        return self

    def set_(self, *source: Any) -> torch.Tensor:
        """As ever; to itself, as parametrizations set what they take over, it changes nothing."""
        return self if source and source[0] is self else super().set_(*source)

    def detach(self) -> torch.Tensor:
        """As ever, but to ``nn.Parameter(self)``, which would share the memory."""
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            raise RuntimeError(
                f"{self._name} is offloaded, and another parameter cannot share its memory; make "
                "nn.Parameter(parameter.detach().clone()), or use the parameter itself"
            )
        return torch.Tensor.detach(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            f"{self._name} is offloaded and cannot be pickled or shallowly copied; take "
            "parameter.detach(), or write the model with offloaded.save(path) or "
            "offloaded.export(folder)"
        )


class AbsentParameter(OffloadedParameter):
    """Class that a parameter has while its weights are not in place, or are being updated there."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PASSES and is_by_inputs_alone(func, args, kwargs, _is_absent):
            return by_edges(func, args, kwargs, _is_absent)
        if any(getattr(kind, "comes_before_weights", False) for kind in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__self__", None) in ABOUT_PARAMETERS or func in ABOUT_PARAMETERS:
                return func(*args, **kwargs)
            return _with_weights(func, args, kwargs)


def _with_weights(func: Any, args: Any, kwargs: Any) -> Any:
    """``func`` with the weights of all absent parameters among its arguments in place."""
    absent = [leaf for leaf in tree_leaves((args, kwargs)) if _is_absent(leaf)]
    by_owner: dict[Owner, set[int]] = {}
    for parameter in absent:
        by_owner.setdefault(parameter.offload_owner, set()).add(parameter.offload_index)
    with ExitStack() as stack:
        for owner, indices in by_owner.items():
            stack.enter_context(owner.in_place(indices))
        if any(owner.is_computing for owner in by_owner):
            return _unchanged(func, args, kwargs, absent)
        if func is torch.Tensor.share_memory_ or (func in _SETS and not _is_absent(args[0])):
            raise RuntimeError(
                f"{absent[0]._name} is offloaded and its memory cannot be shared; share "
                "parameter.detach(), a copy"
            )
        if func in SHOWS_MEMORY and not args[0].requires_grad:
            return func(_copy_of(args[0], args[0]), *args[1:], **kwargs)
        result = _unchanged(func, args, kwargs, absent)
        return _with_own_memory(result, {storage_of(parameter): parameter for parameter in absent})


def _serve(operator: Any, args: Any, kwargs: Any) -> Any:
    """What came to placeholders past their classes, see ``placeholders``."""
    args, kwargs = tree_map(partial(_lent, operator), (args, kwargs))
    absent = next(filter(_is_absent, tree_leaves((args, kwargs))), None)
    if absent is not None and operator.namespace == "c10d":
        _refuse_change(operator, absent)
    with torch._C.DisableTorchFunctionSubclass():
        if absent is None:
            return operator(*args, **kwargs)
        return _with_weights(operator, args, kwargs)


def _lent(operator: Any, leaf: Any) -> Any:
    """``leaf``, or a copy of the parameter whose data it was given (by ``x.data = parameter``, or
    as autograd does with what hooks of others return).
    """
    if _is_absent(leaf) or not is_placeholder(leaf):
        return leaf
    if isinstance(leaf, OffloadedGradient):
        leaf.refuse(str(operator))
    parameter = lender_of(leaf)
    has_history = leaf.requires_grad and torch.is_grad_enabled()
    if parameter is None or has_history or operator._schema.is_mutable:
        refuse(leaf)
    return parameter.detach()


serve_placeholders(_serve)


def _unchanged(func: Any, args: Any, kwargs: Any, parameters: Sequence[AbsentParameter]) -> Any:
    """``func`` of weights that are in place. Raises ``RuntimeError`` if it changes one without
    counting it, as collectives do, and gives the weights the values that they had.
    """
    if writes_later(func):
        _refuse_change(func, parameters[0])
    changes = [weight_changes(func, parameter) for parameter in parameters]
    result = func(*args, **kwargs)
    wait_for(func, result)
    for parameter, change in zip(parameters, changes, strict=True):
        if not change.is_counted and change.are_there():
            change.undo()
            _refuse_change(func, parameter)
    return result


def _refuse_change(func: Any, parameter: AbsentParameter) -> None:
    raise RuntimeError(
        f"{getattr(func, '__name__', func)} would change the weights of {parameter._name}, which "
        "is offloaded; change them inside `with offloaded.gathered([parameter], modify=True):`, or "
        "have them updated by offload(optimizer=)"
    )


def _is_absent(value: object) -> bool:
    return isinstance(value, AbsentParameter)


def _with_own_memory(result: Any, parameters: Mapping[int, OffloadedParameter]) -> Any:
    """``result`` with copies for tensors without history that lie in the weights of ``parameters``,
    which are given by their storage, and with ``WeightView`` for those with one.

    The weights are updated in place where they are at home, and left behind where they are not: a
    view that a program keeps would follow the training or not, and hold memory that others need.
    """

    def own(leaf: Any) -> Any:
        is_other = not isinstance(leaf, torch.Tensor)
        if is_other or isinstance(leaf, OffloadedParameter | WeightView):
            return leaf
        parameter = parameters.get(storage_of(leaf))
        if parameter is None:
            return leaf
        if is_mapped(leaf):
            return leaf.clone()
        if leaf.requires_grad and torch.is_grad_enabled():
            return WeightView.of(parameter, leaf)
        return _copy_of(leaf, parameter)

    return tree_map(own, result)


class WeightView(torch.Tensor):
    """A view of weights with a history, which a program took outside of forward passes: it can be
    used until the weights change, see ``KeptViews``.
    """

    _parameter: OffloadedParameter

    @staticmethod
    def of(parameter: OffloadedParameter, view: torch.Tensor) -> WeightView:
        taken: Any = view
        if type(view) is torch.Tensor:  # as_subclass would have a node of its own in the graph,
            taken.__class__ = WeightView  # between it and that which autograd has for parameters
        else:
            taken = view.as_subclass(WeightView)
        taken._parameter = parameter
        parameter.offload_owner.gave_view(parameter.offload_index, taken)
        return cast(WeightView, taken)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(other is not cls and _serves_others(other) for other in types):
            return NotImplemented
        views = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, WeightView)]
        with torch._C.DisableTorchFunctionSubclass():
            owners = {storage_of(view): view._parameter for view in views}
            return _with_own_memory(func(*args, **kwargs), owners)


_ORDINARY: Any = torch.Tensor.__torch_function__


def _serves_others(kind: Any) -> bool:
    """Whether a class of tensors has functions of its own, for tensors of whatever class."""
    return kind.__torch_function__.__func__ is not _ORDINARY.__func__


def _copy_of(view: torch.Tensor, parameter: OffloadedParameter) -> torch.Tensor:
    return copy_of(view, parameter, parameter.offload_index, parameter.offload_owner)


SHOWS_MEMORY = frozenset(
    getattr(torch.Tensor, name) for name in ("numpy", "__array__", "__dlpack__")
)
"""What gives the memory of a tensor in another form than a tensor."""
_SETS = frozenset([torch.Tensor.set_, torch.ops.aten.set_.source_Tensor])


def put_data(parameter: OffloadedParameter, data: torch.Tensor, *, absent: bool) -> None:
    """Let ``parameter`` hold ``data``; ``absent`` if these are not its weights, or not yet.

    After an interrupt it has the old or the new ones, which must be asked for before the next use.
    """
    try:
        parameter.__class__ = OffloadedParameter
        with outside_inference():
            _DATA.__set__(parameter, data)
        if absent:
            parameter.__class__ = AbsentParameter
    except BaseException:
        parameter.__class__ = AbsentParameter
        raise


def mark_absent(parameter: OffloadedParameter) -> None:
    """The weights are in place, but must be asked for before the next use."""
    parameter.__class__ = AbsentParameter


def take_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """The tensor that autograd put on ``parameter``, which is taken off it."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: torch.Tensor | None = _GRAD.__get__(parameter)
        _GRAD.__set__(parameter, None)
    return gradient


def cannot_be_copied() -> RuntimeError:
    """What ``copy.deepcopy`` and ``pickle`` of an offloaded model end in."""
    return RuntimeError(
        "an offloaded model cannot be copied or pickled; write it with offloaded.save(path) or "
        "offloaded.export(folder), or copy the values of its parameters"
    )
