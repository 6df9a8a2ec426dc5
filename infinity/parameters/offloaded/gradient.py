"""The gradient of an offloaded parameter as programs see it, and what they may assign to it.

It is a tensor like any other to look at. Each operation on it reads the values, the gradients of
one parameter at a time, and what an operation changed in place is kept. So what programs and
frameworks do with gradients (clipping, norms, ``GradScaler``) is done as to tensors in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from infinity.parameters.offloaded.changes import Changes, wait_for, writes_later
from infinity.parameters.offloaded.histories import ChangeCount, Source, marks_of, with_histories
from infinity.parameters.offloaded.modes import without_history
from infinity.parameters.offloaded.placeholders import ABOUT_GRADIENTS, as_they_are, storage_of


class GradientOwner(Protocol):
    """Who keeps gradients."""

    def gradient_values(self, index: int, age: int) -> torch.Tensor:
        """A copy on the compute device. Raises ``RuntimeError`` where it cannot be had, or has
        been cleared since it had that ``age``.
        """

    def gradient_age(self, index: int) -> int:
        """How often it was cleared or replaced."""

    def gradient_counts(self, index: int) -> Sequence[ChangeCount]:
        """What counts the changes of the values that it has now; of its parts, if it has some."""

    def keep_gradient(self, index: int, values: torch.Tensor) -> None:
        """Let the gradient have these values."""

    def overwrite_gradient(self, index: int, age: int, values: torch.Tensor) -> None:
        """Let the gradient have these values, also if a step has used those it had. Raises
        ``RuntimeError`` where it has been cleared since it had that ``age``.
        """

    def name_of(self, index: int) -> str:
        """What the model calls the parameter."""


class OffloadedGradient(torch.Tensor):
    """Stands for a gradient: what is done to it is done to the values, wherever they are."""

    comes_before_weights = True
    """Whether operations come here first that have absent weights, too, among their operands: they
    are passed on with values in the place of what is served here.
    """
    _owner: GradientOwner
    _index: int
    _age: int
    _marks: Sequence[list[torch.Tensor]]
    """Its history; of its parts, if it has some."""
    _detached: Source | None = None
    """What it was detached of, if it was: it does not follow that to other memory."""

    @staticmethod
    def of(owner: GradientOwner, index: int, face: torch.Tensor) -> OffloadedGradient:
        """The gradient of a parameter; ``face`` has its shape, dtype and device."""
        with as_they_are():
            gradient = face.as_subclass(OffloadedGradient)
        gradient._owner, gradient._index = owner, index
        gradient._age = owner.gradient_age(index)
        gradient._marks = [count.marks for count in owner.gradient_counts(index)]
        return gradient

    def stands_for(self, owner: GradientOwner, index: int) -> bool:
        """Whether this is the gradient that the parameter has now."""
        same = self._owner is owner and self._index == index
        is_left = self._detached is not None and self._detached.has_moved
        return same and self._age == owner.gradient_age(index) and not is_left

    def read(self) -> torch.Tensor:
        """The values, a copy whose changes are counted."""
        self.check_followed()
        return self._owner.gradient_values(self._index, self._age)

    def differentiable(self, values: torch.Tensor) -> torch.Tensor:
        """``values``, behind the marks of their histories."""
        marks = [mark for part in self._marks for mark in part]
        return with_histories(values, marks, self.name_of_parameter)

    def detached(self) -> OffloadedGradient:
        same = OffloadedGradient.of(self._owner, self._index, self)
        same._age, same._marks = self._age, [[] for _ in self._marks]
        same._detached = self._detached or self.source()
        return same

    def source(self) -> Source:
        return Source.of(self.name_of_parameter, self._owner.gradient_counts(self._index))

    def check_followed(self) -> None:
        """Raises ``RuntimeError`` where it has in memory what the gradient has no more."""
        if self._detached is not None:
            self._detached.check_followed()

    def moves(self) -> None:
        """A program has given it other memory."""
        for count in self._owner.gradient_counts(self._index):
            count.moves += 1

    def set_histories(self, marks: Sequence[torch.Tensor] = (), *, joins: bool = False) -> Any:
        for part in self._marks:
            part[:] = (*(part if joins else ()), *marks)
        return self

    def becomes_it(self) -> None:
        """The parameter's gradient, of which it may have been detached, has its history now."""
        counts = self._owner.gradient_counts(self._index)
        for count, marks in zip(counts, self._marks, strict=True):
            count.marks = marks

    def keep(self, values: torch.Tensor) -> None:
        """What ``read`` gave was changed."""
        self._owner.keep_gradient(self._index, values)

    def refuse(self, operation: str) -> None:
        _refuse(operation, self.name_of_parameter)

    @property
    def name_of_parameter(self) -> str:
        return self._owner.name_of(self._index)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            name = getattr(func, "__name__", str(func))
            if func in ABOUT_GRADIENTS or (name == "__get__" and func.__self__ in ABOUT_GRADIENTS):
                return func(*args, **kwargs)
            if func in _SAME:
                return args[0].detached()
            if name == "detach_" or (name == "requires_grad_" and not all(args[1:])):
                return args[0].set_histories()
            if name in _REFUSED or name in _RESHAPES or writes_later(func):
                _refuse(name, next(_gradients_in((args, kwargs))).name_of_parameter)
            if func == _SET_DATA:
                return _set_data(args[0], args[1])
            if name in ("__set__", "__delete__"):
                _refuse(name, next(_gradients_in((args, kwargs))).name_of_parameter)
            if name in ("mul_", "_foreach_mul_", "div_") and _is_one(args[1:], kwargs):
                return args[0]  # clipping that does not set in
            if name in _OVERWRITES and isinstance(args[0], OffloadedGradient):
                return _overwrite_by(func, args, kwargs)
            if name.startswith(("_foreach_", "_amp_foreach_")):
                return _one_by_one(func, args, kwargs)
            return _on_values(func, args, kwargs)


class GradientValues(torch.Tensor):
    """A view of a copy of a gradient, to be read only, and until the gradient changes: a change in
    one would not reach the other.
    """

    comes_before_weights = True
    _source: Source

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Operators of others than torch, collectives too, may write without counting it."""
        views = [x for x in tree_leaves((args, kwargs)) if isinstance(x, GradientValues)]
        return _checked(func, args, kwargs or {}, views, counts_changes=False)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            views = [x for x in tree_leaves((args, kwargs)) if isinstance(x, GradientValues)]
            name = getattr(func, "__name__", str(func))
            if func in ABOUT_GRADIENTS or (name == "__get__" and func.__self__ in ABOUT_GRADIENTS):
                return func(*args, **kwargs)
            if name in _REFUSED or name in ("__set__", "__delete__") or writes_later(func):
                _refuse(name, views[0]._source.name)
            result = _checked(func, args, kwargs, views, counts_changes=None)
            owners = {storage_of(view): view._source for view in views}
            return tree_map(lambda leaf: _read_only(leaf, owners), result)


def _checked(
    func: Any,
    args: Any,
    kwargs: Any,
    views: Sequence[GradientValues],
    *,
    counts_changes: bool | None,
) -> Any:
    """``func`` of ``views``. Raises ``RuntimeError`` if it changed one, or one is out of date."""
    for view in views:
        view._source.check()
    with torch._C._DisableTorchDispatch():
        plain = {id(view): view.as_subclass(torch.Tensor) for view in views}
    changes = [Changes(func, plain[id(view)], counts_changes) for view in views]
    target = tree_leaves(args[:1]) if _is_in_place(func, kwargs) else []
    for view in (view for view in views if any(view is one for one in target)):
        _refuse_change(func, view)
    with _served_by_others() if counts_changes is None else nullcontext():
        result = func(*_with_values(args, plain), **_with_values(kwargs, plain))
    wait_for(func, result)
    for view, change in zip(views, changes, strict=True):
        if change.are_there():
            _refuse_change(func, view)
    return result


def _refuse_change(func: Any, view: GradientValues) -> None:
    name = getattr(func, "__name__", func)
    raise RuntimeError(
        f"{name} changed a view of the gradient of {view._source.name}, which is a copy: it is as "
        "it was itself; change the whole of it in place, or assign to the parameter's grad"
    )


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """``func`` of the values in the place of the gradients; what it changed of them is kept."""
    found = {id(gradient): gradient for gradient in _gradients_in((args, kwargs))}
    values = {key: gradient.read() for key, gradient in found.items()}
    changes = {key: Changes(func, tensor) for key, tensor in values.items()}
    is_in_place = _is_in_place(func, kwargs)
    target = set(map(id, tree_leaves(args[:1]))) if is_in_place else set()
    is_target = any(key in target for key in found)
    seen = {k: v if k in target else found[k].differentiable(v) for k, v in values.items()}
    args, kwargs = _with_values((args, kwargs), seen)
    # A gradient that is changed in place has no history, and gets none.
    with _served_by_others():
        result = without_history(func, when=is_target)(*args, **kwargs)
    wait_for(func, result)
    joining = marks_of((args[1:], kwargs)) if is_target else ()
    for key, gradient in found.items():
        if changes[key].are_there() or key in target:
            gradient.keep(values[key])
            gradient.set_histories(joining, joins=True)
    return _as_seen(result, found, values)


_served_by_others: Callable[[], AbstractContextManager[Any]] = torch._C._EnableTorchFunction
"""Inside, an operation comes to the classes of its other operands (weights that are absent or in
tiles, views of gradients), which replace theirs.
"""


def _with_values(tree: Any, values: Mapping[int, torch.Tensor]) -> Any:
    return tree_map(lambda leaf: values.get(id(leaf), leaf), tree)


def _overwrite(gradient: OffloadedGradient, fill: Callable[[torch.Tensor], Any]) -> Any:
    """Have ``fill`` write all values; none of those before are asked for."""
    gradient.check_followed()
    values = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    with _served_by_others():
        without_history(fill)(values)
    gradient._owner.overwrite_gradient(gradient._index, gradient._age, values)
    return gradient


def _overwrite_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``func``, which gives its first argument, a gradient, values that owe nothing to the old."""
    sources = {id(one): one.differentiable(one.read()) for one in _gradients_in((args[1:], kwargs))}
    rest = _with_values((args[1:], kwargs), sources)
    _overwrite(args[0], lambda values: func(values, *rest[0], **rest[1]))
    # Where nothing has a history, what it had stays.
    return args[0].set_histories(marks_of(rest), joins=not torch.is_grad_enabled())


def _set_data(gradient: OffloadedGradient, data: Any) -> None:
    if gradient._detached is not None:  # which would go on as a tensor of its own
        gradient.refuse("data.__set__ of what was detached")
    _overwrite(gradient, lambda values: _copy_exactly(values, data))
    gradient.moves()


def _copy_exactly(values: torch.Tensor, source: Any) -> None:
    """As the setter of ``data``, which neither broadcasts nor converts."""
    if isinstance(source, OffloadedGradient):
        source = source.read()
    if not isinstance(source, torch.Tensor):
        raise TypeError(f"the data of a gradient is a tensor, not a {type(source).__name__}")
    if source.shape != values.shape or source.dtype != values.dtype:
        raise RuntimeError(
            f"the data of a gradient of shape {tuple(values.shape)} and {values.dtype} cannot be "
            f"of shape {tuple(source.shape)} and {source.dtype}"
        )
    values.copy_(source)


def _is_in_place(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """By its name: not all operations on lists count the changes that they make."""
    if kwargs.get("inplace") is True:  # activations and dropout of torch.nn.functional
        return True
    name = getattr(func, "__name__", "")
    return bool(name.endswith("_") and not name.endswith("__")) or name == "__setitem__"


def _as_seen(
    result: Any, found: Mapping[int, OffloadedGradient], values: Mapping[int, torch.Tensor]
) -> Any:
    """``result`` with the gradients in the place of their values, and views of these read only."""
    by_values = {id(tensor): found[key] for key, tensor in values.items()}
    owners = {storage_of(tensor): found[key].source() for key, tensor in values.items()}

    def seen(leaf: Any) -> Any:
        return by_values[id(leaf)] if id(leaf) in by_values else _read_only(leaf, owners)

    return tree_map(seen, result)


def _read_only(leaf: Any, owners: Mapping[Any, Source]) -> Any:
    if isinstance(leaf, np.ndarray):
        leaf.flags.writeable = False
        return leaf
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
        return leaf
    source = owners.get(storage_of(leaf))
    return leaf if source is None else read_only(leaf, source)


def read_only(values: torch.Tensor, source: Source) -> GradientValues:
    """``values``, a copy of those that the gradient has, or a view of one."""
    view = values.as_subclass(GradientValues)
    view._source = source
    return view


def _one_by_one(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operation on lists, one element after the other: one gradient is in memory at a time."""
    kwargs = dict(kwargs)
    args = [*args] or [kwargs.pop("self")]
    count = next(len(arg) for arg in (*args, *kwargs.values()) if isinstance(arg, (list, tuple)))
    if func in _OVERWRITE_EACH:
        args += [kwargs.pop("src")] if "src" in kwargs else []
        for position, gradient in enumerate(args[0]):
            own = [gradient, *(arg[position] for arg in args[1:2]), *args[2:]]
            of_one = _OVERWRITE_EACH[func]
            overwrite = _overwrite_by if isinstance(gradient, OffloadedGradient) else _on_values
            overwrite(of_one, own, kwargs)
        return None

    def alone(value: Any, position: int) -> Any:
        is_list = isinstance(value, (list, tuple)) and len(value) == count
        is_row = isinstance(value, torch.Tensor) and value.shape == (count,)  # of ``scalars``
        return value[position : position + 1] if is_list or is_row else value

    results = []
    for at in range(count):
        own, named = [alone(arg, at) for arg in args], {k: alone(v, at) for k, v in kwargs.items()}
        results.append(_on_values(func, own, named))
    if all(result is None for result in results):
        return None
    return tuple(element for result in results for element in result)


def _gradients_in(tree: Any) -> Any:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, OffloadedGradient))


def _is_one(factors: Sequence[Any], options: Mapping[str, Any]) -> bool:
    if len(factors) != 1 or options:
        return False
    factor = factors[0]
    if isinstance(factor, torch.Tensor):
        is_scalar = not isinstance(factor, OffloadedGradient) and factor.dim() == 0
        return is_scalar and not factor.requires_grad and factor.item() == 1.0
    return isinstance(factor, float | int) and factor == 1.0


def _refuse(name: str, parameter: str) -> None:
    raise RuntimeError(
        f"{name}: the gradient of {parameter}, which is offloaded, is not a tensor in memory; take "
        "its values with offloaded.gradient(parameter), change them in place as a whole, or assign "
        "to the parameter's grad"
    )


_OVERWRITES = frozenset(("zero_", "fill_", "copy_"))
_OVERWRITE_EACH = {
    torch._foreach_zero_: torch.Tensor.zero_,
    torch._foreach_copy_: torch.Tensor.copy_,
}
_RESHAPES = frozenset(
    ("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_")
)
"""What would have the values of the whole in another order or shape."""
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SAME = frozenset((torch.Tensor.detach, torch.Tensor.data.__get__, torch.detach))  # type: ignore[attr-defined]
_REFUSED = frozenset(
    (
        *("data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_", "set_"),
        *("resize_", "resize_as_", "requires_grad_", "register_hook", "backward", "retain_grad"),
        *("__dlpack__", "__cuda_array_interface__", "register_post_accumulate_grad_hook"),
    )
)
