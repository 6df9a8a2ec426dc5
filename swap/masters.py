"""Converts values of a parameter to components and back: weights, what a master adds to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from swap.kernels import merge_master, split_master
from swap.plain import check_memory, plain


def components_from(
    values: torch.Tensor, dtype: torch.dtype, names: Collection[str]
) -> dict[str, torch.Tensor]:
    """Flat CPU ``values`` as the components that hold them, of those in ``names``; weights are of
    ``dtype``. Raises ``ValueError`` for values whose memory has been freed.
    """
    check_memory("a tensor of values", values)
    values = plain(values)
    if "lo" in names:
        high = torch.empty(values.numel(), dtype=torch.bfloat16, device="cpu")
        low = torch.empty(values.numel(), dtype=torch.int16, device="cpu")
        split_master(values.to(torch.float32).contiguous(), high, low)
        return {"weight": high, "lo": low}
    components = {"weight": values.to(dtype).contiguous()}
    if "master" in names:
        components["master"] = values.to(torch.float32).contiguous()
    return components


def values_from(
    read: Callable[[str, torch.Tensor], None],
    numel: int,
    dtype: torch.dtype,
    names: Collection[str],
) -> torch.Tensor:
    """The values, in the precision of the master (the weights' own if there is none); ``read``
    fills a tensor from a component.
    """
    if "master" in names:
        master = torch.empty(numel, dtype=torch.float32, device="cpu")
        read("master", master)
        return master
    weight = torch.empty(numel, dtype=dtype, device="cpu")
    read("weight", weight)
    if "lo" not in names:
        return weight
    low = torch.empty(numel, dtype=torch.int16, device="cpu")
    read("lo", low)
    master = torch.empty(numel, dtype=torch.float32, device="cpu")
    merge_master(weight, low, master)
    return master


def master_of(components: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The values that the components hold, for a rule that updates them: the master itself or, of
    halves, a copy, see ``keep_master``.
    """
    if "lo" in components:
        out = torch.empty(components["weight"].numel(), dtype=torch.float32, device="cpu")
        merge_master(components["weight"], components["lo"], out)
        return out
    return components.get("master", components["weight"])


def keep_master(master: torch.Tensor, components: Mapping[str, torch.Tensor]) -> None:
    """Let the components hold what became of ``master_of`` them."""
    if "lo" in components:
        split_master(master, components["weight"], components["lo"])
    elif "master" in components:
        components["weight"].copy_(master)
