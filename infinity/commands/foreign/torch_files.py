"""Files that ``torch.save`` wrote: the state dict of ``torch.optim.AdamW``, alone or in another.

Tensors stay in the file, which is mapped. It is read with ``weights_only=True``, so nothing in it
is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.commands.foreign.state import (
    NOT_OPTIONS,
    WIDENED,
    ForeignState,
    as_float32,
    check_kept,
    check_moments,
    check_options,
    step_count,
)

PLACES = ("optimizer", "optimizer_state_dict", "optim", "optimizer_states")
"""Where loops keep it in the dict that they save."""


def load_mapped(path: Path) -> Any:
    """What a file has. Raises ``ValueError`` for one with more than tensors and containers."""
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # of whatever kind: the bytes of a file decide what is met
        raise ValueError(
            f"{path} cannot be read without running what is in it, or is no file of torch.save "
            f"({_first_line(error)}); load it where you trust it, and save its state dict alone: "
            "torch.save(optimizer.state_dict(), 'optimizer.pt')"
        ) from error


def read_torch_file(path: Path, model: nn.Module, *, is_ordered: bool) -> ForeignState:
    """``is_ordered``: whether the model lists its parameters in the order of the real one."""
    state = optimizer_in(load_mapped(path), path)
    groups = state["param_groups"]
    for group in groups:
        check_options(group, path)
    names = dict(_names_by_key(groups, model, path, is_ordered=is_ordered))
    moments, steps = {}, {}
    for key, kept in state["state"].items():
        name = names.get(key, str(key))
        check_kept(kept, name, path)
        check_moments(kept, name, path, *WIDENED)
        moments[name] = (as_float32(kept["exp_avg"]), as_float32(kept["exp_avg_sq"]))
        steps[name] = step_count(kept["step"], f"step of {name}", path)
    return ForeignState(
        moments=moments,
        steps=steps,
        groups=[
            {k: v for k, v in group.items() if k not in NOT_OPTIONS}
            | {"params": [names.get(key, str(key)) for key in group["params"]]}
            for group in groups
        ],
    )


def _check_form(state: Any, groups: Any, path: Path) -> None:
    """Raises ``ValueError`` for what only has the names of a state dict."""
    is_state = isinstance(state, Mapping) and all(isinstance(s, Mapping) for s in state.values())
    if not is_state or not isinstance(groups, Sequence) or not all(map(_is_group, groups)):
        raise ValueError(
            f"{path} has `state` and `param_groups` that are not those of a state dict of an "
            "optimizer; save optimizer.state_dict()"
        )


def _is_group(group: Any) -> bool:
    """Whether parameters have a number or a name, and in ``param_names``, where that is, a name."""
    if not isinstance(group, Mapping):
        return False
    keys, names = group.get("params"), group.get("param_names", [])
    if not isinstance(keys, list | tuple) or not isinstance(names, list | tuple):
        return False
    return all(isinstance(k, int | str) for k in keys) and all(isinstance(n, str) for n in names)


def optimizer_in(found: Any, path: Path) -> Mapping[str, Any]:
    candidates = [found]
    if isinstance(found, Mapping):
        candidates += [found[place] for place in PLACES if place in found]
    for candidate in candidates:
        if isinstance(candidate, Sequence) and len(candidate) == 1:
            candidate = candidate[0]
        if isinstance(candidate, Mapping) and {"state", "param_groups"} <= candidate.keys():
            _check_form(candidate["state"], candidate["param_groups"], path)
            return candidate
    keys = sorted(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
    raise ValueError(
        f"{path} has no state dict of an optimizer, with `state` and `param_groups`, at its top or "
        f"in {', '.join(PLACES)}; it has {keys}"
    )


def _names_by_key(
    groups: Sequence[Mapping[str, Any]], model: nn.Module, path: Path, *, is_ordered: bool
) -> Iterator[tuple[Any, str]]:
    """The name of each parameter that groups have by a number: as they say themselves, or else by
    the order in which the model lists its parameters.
    """
    for group, listed in zip(groups, _listed(groups, model, path, is_ordered), strict=True):
        given = group.get("param_names", listed)
        if len(given) != len(group["params"]):
            raise ValueError(
                f"{path} has {len(group['params'])} parameters in a group where the model has "
                f"{len(given)}; save the state of an optimizer that was given "
                "model.named_parameters(), which keeps the names"
            )
        yield from zip(group["params"], given, strict=True)


def _listed(
    groups: Sequence[Mapping[str, Any]], model: nn.Module, path: Path, is_ordered: bool
) -> list[list[str]]:
    keys = [key for group in groups for key in group["params"]]
    if all("param_names" in group for group in groups) or all(isinstance(k, str) for k in keys):
        return [[str(key) for key in group["params"]] for group in groups]
    if not is_ordered:
        raise ValueError(
            f"{path} numbers the parameters, and a file of weights does not say in which order a "
            "model lists them; give the folder with config.json as --model, or save the state of "
            "an optimizer that was given model.named_parameters()"
        )
    names = [name for name, _ in model.named_parameters()]
    if len(groups) == 1:
        return [names]
    decayed = _decayed(model)
    if len(groups) == 2:
        return [[n for n in names if n in decayed], [n for n in names if n not in decayed]]
    raise ValueError(
        f"{path} has {len(groups)} groups of parameters that are only numbered; save the state of "
        "an optimizer whose groups were given (name, parameter) pairs, which keeps the names"
    )


def _decayed(model: nn.Module) -> set[str]:
    """Parameters in the first of the two groups that transformers' Trainer makes."""
    try:
        from transformers import Trainer
    except ImportError as error:
        raise ValueError(
            "the state has two groups of numbered parameters, as transformers' Trainer makes them, "
            "and transformers is not installed"
        ) from error
    of_class: Any = Trainer.get_decay_parameter_names
    return set(of_class(None, model))  # of the model alone; there is no trainer


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
