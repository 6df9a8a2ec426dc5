"""``torch.autograd.grad`` and ``backward`` by offloaded parameters: autograd asks for no weights of
what it differentiates by, so none are put in place for it.

It is told which parameters are meant by their edges in the graph. Calls are passed on with torch
functions enabled: hooks and recomputation inside them use parameters, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from infinity.parameters.offloaded.placeholders import as_they_are

PASSES: frozenset[Callable[..., Any]] = frozenset({torch.autograd.grad, torch.autograd.backward})


def by_edges(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_absent: Callable[[Any], bool],
) -> Any:
    """Call one of ``PASSES`` without its absent ``inputs`` in place."""
    given = signature(function).bind(*args, **kwargs).arguments
    inputs = given["inputs"]
    names = [*inputs] if isinstance(inputs, dict) else None
    each = [*inputs.values()] if isinstance(inputs, dict) else _listed(inputs)
    given["inputs"] = [_edge_of(one) if is_absent(one) else one for one in each]
    materialize = given.pop("materialize_grads", False)
    if materialize:  # which torch does not do for edges
        given["allow_unused"] = True
    found = function(**given)
    if found is None:
        return None
    if materialize:
        found = tuple(
            _zeros(one, requires_grad=given.get("create_graph", False))
            if result is None
            else result
            for one, result in zip(each, found, strict=True)
        )
    return found if names is None else dict(zip(names, found, strict=True))


def _listed(inputs: Any) -> list[Any]:
    is_one = isinstance(inputs, (torch.Tensor, torch.autograd.graph.GradientEdge))
    return [inputs] if is_one else [*inputs]


def _edge_of(parameter: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        if not parameter.requires_grad:
            raise RuntimeError("One of the differentiated Tensors does not require grad")
        with as_they_are():
            return get_gradient_edge(parameter)


def _zeros(parameter: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
    return torch.zeros(
        parameter.shape,
        dtype=parameter.dtype,
        device=parameter.device,
        requires_grad=requires_grad,
    )


def is_by_inputs_alone(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_absent: Callable[[Any], bool],
) -> bool:
    """Whether absent parameters are among the ``inputs`` and nowhere else."""
    given = signature(function).bind(*args, **kwargs).arguments
    others = [value for name, value in given.items() if name != "inputs"]
    return "inputs" in given and not any(map(is_absent, tree_leaves(others)))
