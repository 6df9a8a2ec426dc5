"""The optimizer that users hold inside the block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import unwrap
from typing import Any, NoReturn, Protocol

import torch

from infinity.optim.rule import OF_MEMBERS
from infinity.optim.state_reference import KEY
from infinity.optim.torch_optimizer.workers import has_own
from infinity.parameters.offloaded.handlers import check_not_amid
from infinity.tiling.tile import whole_name
from infinity.tiling.weight import TiledWeight

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]


class StepTaker(Protocol):
    """What the optimizer's calls are passed on to."""

    def take_step(self) -> None:
        """Clip, and start the update of every parameter that has a gradient."""

    def index_of(self, parameter: torch.Tensor) -> int:
        """Of a parameter of the model."""

    def name_of(self, index: int) -> str:
        """Of the parameter of that index."""

    def clear_gradients(self) -> None:
        """Forget all gradients."""

    def describe_state(self) -> dict[str, Any]:
        """Which state it is that the optimizer has now."""

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` unless ``state_dict`` is of the state that is here."""

    def restore_loss_scale(self, saved: Sequence[Any] | None) -> None:
        """Be as it was told in ``describe_state``."""


_NOT_HERE = "the state of an offloaded optimizer is not in memory; call offloaded.save(path)"


# Without the wrapper that keeps torch.compile, which offloaded models never meet, from tracing it:
# that loads torch._dynamo, some 70 MiB, which inference in plain PyTorch does not take.
_add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
_zero_grad = unwrap(torch.optim.Optimizer.zero_grad)


def check_in_model(parameter: torch.Tensor) -> None:
    """Raises ``ValueError`` for a parameter that is in tiles, which are updated in its place."""
    if isinstance(parameter, TiledWeight):
        raise ValueError(
            f"{parameter._cut_name} is in tiles while the model is offloaded, and its tiles "
            "are what an optimizer updates; make groups of the parameters that the factory is "
            "given, or of model.parameters() inside the block, not of a list from before it"
        )


def _refuse_reading(*_: Any, **__: Any) -> NoReturn:
    """Whatever would find no state in ``optimizer.state`` where there is some."""
    raise RuntimeError(_NOT_HERE)


def _refuse_change(*_: Any, **__: Any) -> NoReturn:
    """Whatever would change the state by way of ``optimizer.state``, as to begin anew."""
    raise TypeError(
        "the state of an offloaded optimizer is not in memory and cannot be changed through "
        "optimizer.state; offloaded.load(path) brings back what offloaded.save wrote, and another "
        "offload block over the model, behind this one, begins without state"
    )


class AbsentState(dict[torch.Tensor, Any]):
    """``state`` of an optimizer that has none to show: what is asked of a parameter, or would
    change something, raises. It lists nothing, as code that moves what it lists has nothing to do.

    Code that asks whether it is empty is about to take the state, or, as torch does for
    ``get_optimizer_state_dict``, a step with gradients of zero to make one. What it would get lacks
    the moments, which would come out only when they are loaded.
    """

    __bool__ = __missing__ = __contains__ = get = _refuse_reading
    __setitem__ = __delitem__ = __ior__ = _refuse_change
    clear = pop = popitem = setdefault = update = _refuse_change


class OffloadedOptimizer(torch.optim.Optimizer):
    """The optimizer of an offloaded model: ``param_groups``, schedulers and step hooks work as
    ever.

    Its state is not in ``state``; it is saved with ``offloaded.save``. It can be neither copied nor
    pickled.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        defaults: dict[str, Any],
        owner: StepTaker,
        *,
        made: torch.optim.Optimizer | None = None,
    ) -> None:
        """``made`` by a factory: the groups are those of that."""
        super().__init__(parameters if made is None else made.param_groups, defaults)
        self._owner = owner
        self._made = made
        self.state = AbsentState()  # type: ignore[assignment]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Of parameters of the model. Raises ``ValueError`` for another one, which nothing would
        update, and where the class that a factory made does it in its own way; the group is not
        added then.
        """
        self._check_not_own("add_param_group", "make all groups in the factory")
        _add_param_group(self, param_group)
        if "_owner" not in vars(self):
            return  # made as the block begins
        for parameter in self.param_groups[-1]["params"]:
            if isinstance(parameter, TiledWeight):
                del self.param_groups[-1]
                check_in_model(parameter)
            owner = getattr(parameter, "offload_owner", None)
            if owner is not self._owner:
                del self.param_groups[-1]
                what = (
                    f"a parameter of shape {tuple(parameter.shape)} is none of the offloaded model"
                    if owner is None
                    else f"{owner.name_of(parameter.offload_index)} is of another offload block"
                )
                raise ValueError(
                    f"{what}, and this optimizer cannot update it; put it into the model before "
                    "the block, or give it an optimizer of its own"
                )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Fix the update (norm, clipping, options, step counts) and start it; it finishes behind
        the next forward.

        Raises what stopped the update before this one. The gradients are consumed: clear them with
        ``zero_grad``.
        """
        check_not_amid("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._owner.take_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; or, with ``set_to_none=False``, give those that are there values of
        zero: the next step is taken for these parameters whether the next pass reaches them or not.
        """
        check_not_amid("zero_grad()")
        if set_to_none:
            self._owner.clear_gradients()
        else:
            _zero_grad(self, set_to_none=False)

    def state_dict(self) -> dict[str, Any]:
        """Groups and options as ever, and which state it is: where the state is stays, see
        ``state_reference``. Small, of numbers and text.
        """
        packed: dict[str, Any] = super().state_dict()
        return {**packed, KEY: {**self._owner.describe_state(), "groups": self._members()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the options of ``state_dict``, and its loss scale; the state that it is of must be
        here already, in the run that it was taken in or by ``offloaded.load``.

        Raises ``ValueError`` saying what to do if it is not, or if the class that a factory made
        loads in its own way, before anything is changed.
        """
        self._check_not_own("load_state_dict", "offloaded.load(path) goes on from what was saved")
        self._owner.check_state(state_dict)
        groups = {"state": {}, "param_groups": self._groups_of(state_dict)}
        try:
            super().load_state_dict(groups)
        finally:  # hooks of the program may raise behind it
            self.state = AbsentState()  # type: ignore[assignment]
        self._owner.restore_loss_scale(state_dict[KEY]["loss_scale"])

    def _members(self) -> list[list[str]]:
        """The names of what is in each group, tiles together."""
        index_of, name_of = self._owner.index_of, self._owner.name_of
        return [
            sorted({whole_name(name_of(index_of(parameter))) for parameter in group["params"]})
            for group in self.param_groups
        ]

    def _groups_of(self, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The groups of ``state_dict``; with our tiles, where they are of the same weights."""
        theirs, told = state_dict["param_groups"], state_dict[KEY].get("groups", [])
        if told != self._members():
            return [*theirs]
        groups = []
        for group, own in zip(theirs, self.param_groups, strict=True):
            options = {key: value for key, value in group.items() if key not in OF_MEMBERS}
            members = {key: own[key] for key in OF_MEMBERS if key in own}
            groups.append({**options, **members, "params": [*range(len(own["params"]))]})
        return groups

    def _check_not_own(self, method: str, instead: str) -> None:
        made = vars(self).get("_made")
        if made is not None and has_own(made, method):
            raise ValueError(
                f"{type(made).__name__} has a {method}() of its own, which an offloaded optimizer "
                f"does not call; {instead}, and what else it does belongs into step()"
            )

    def _is_of_made(self, name: str) -> bool:
        """Whether the optimizer that a factory made has it, and this one has not."""
        made = vars(self).get("_made")
        if made is None or name.startswith("_") or hasattr(OffloadedOptimizer, name):
            return False
        return name not in vars(self) and (name in vars(made) or hasattr(type(made), name))

    def _refusal(self, name: str) -> AttributeError:
        return AttributeError(
            f"the optimizer of an offloaded model has no {name!r}; that of "
            f"{type(self._made).__name__}, which the factory made, is not available here, as "
            "updates of single parameters have the optimizer as it was made: what its methods do "
            "belongs into step(), and what changes between steps into the groups "
            "(optimizer.param_groups[0]['...'])"
        )

    def __getattr__(self, name: str) -> Any:
        if self._is_of_made(name):
            raise self._refusal(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_of_made(name):
            raise self._refusal(name)
        if name == "state" and "_owner" in vars(self) and not isinstance(value, AbsentState):
            _refuse_change()
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "the optimizer of an offloaded model cannot be copied or pickled; take its "
            "state_dict(), and save the state that it is of with offloaded.save(path)"
        )
