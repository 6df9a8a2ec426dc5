"""A model's modules again, with tensors of their own: what initialising functions may be run on.

Every module is copied without its tensors, at the place that it has, so that a function which
reaches for children and for parameters of theirs finds them. Parameters are on the meta device;
single ones are made real for as long as their values are drawn. The model itself is never touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from infinity.values.initial.init_functions import MARK

_SMALL_ELEMENTS = 16 * 1024
"""Buffers of up to this many elements are copied with their values; others are on meta."""

Place = tuple[nn.Module, str, bool]
"""A module of the skeleton, a name in it, and whether that is a buffer's."""


class Skeleton:
    """Of ``model`` as it is now: layers may leave it later, see ``tiling``."""

    def __init__(self, model: nn.Module) -> None:
        self._copies: dict[int, nn.Module] = {}
        self._stand_ins: dict[int, torch.Tensor] = {}
        self._places: dict[int, list[Place]] = {}
        self._keys: dict[int, list[int]] = {}
        self._on_meta = {id(buffer) for buffer in model.buffers() if buffer.is_meta}
        # Identities stay those of these objects for as long as they are kept.
        self._originals: list[Any] = [model, *model.modules(), *model.parameters()]
        self._originals += model.buffers()
        self.model = self._copy(model)
        for module in [*model.modules()]:
            self._untie(module)

    def buffers_on_meta(self, module: nn.Module) -> dict[str, tuple[int, torch.Tensor]]:
        """By name, those of a module of the model that were there: identity and stand-in."""
        copy = self._copies[id(module)]
        return {
            name: (key, self._stand_ins[key])
            for key in self._keys.get(id(copy), ())
            for owner, name, is_buffer in self._places[key]
            if owner is copy and is_buffer and key in self._on_meta
        }

    @contextmanager
    def holding(self, tensors: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """These in the places of tensors of the model, by identity; the stand-ins again after."""
        try:
            for key, tensor in tensors.items():
                self._put(key, tensor)
            yield
        finally:
            self.restore(tensors)

    def restore(self, keys: Iterable[int]) -> None:
        """The stand-ins in the places of these tensors of the model."""
        for key in keys:
            self._put(key, self._stand_ins[key])

    def now(self, key: int) -> torch.Tensor | None:
        """What is in the place of a tensor of the model; functions may put another one there."""
        module, name, is_buffer = self._places[key][0]
        return (module._buffers if is_buffer else module._parameters).get(name)

    def stand_ins(self, module: nn.Module) -> dict[int, torch.Tensor]:
        """What is in the places of all tensors of a module of the skeleton and of those in it."""
        keys = (key for inner in module.modules() for key in self._keys.get(id(inner), ()))
        return {key: self._stand_ins[key] for key in keys}

    def _put(self, key: int, tensor: torch.Tensor) -> None:
        for module, name, is_buffer in self._places[key]:
            into = module._buffers if is_buffer else module._parameters
            into[name] = tensor  # type: ignore[assignment]

    def _copy(self, module: nn.Module) -> nn.Module:
        found = self._copies.get(id(module))
        if found is not None:
            return found
        copy: nn.Module = object.__new__(type(module))
        copy.__dict__.update(module.__dict__)
        copy.__dict__.pop(MARK, None)
        self._copies[id(module)] = copy
        parameters: dict[str, Any] = {}
        buffers: dict[str, Any] = {}
        copy.__dict__["_parameters"] = parameters
        copy.__dict__["_buffers"] = buffers
        for name, parameter in module._parameters.items():
            parameters[name] = None if parameter is None else self._parameter(parameter)
            self._note(copy, name, parameter, is_buffer=False)
        for name, buffer in module._buffers.items():
            buffers[name] = None if buffer is None else self._buffer(buffer)
            self._note(copy, name, buffer, is_buffer=True)
        copy.__dict__["_modules"] = {
            name: None if child is None else self._copy(child)
            for name, child in module._modules.items()
        }
        return copy

    def _note(
        self, copy: nn.Module, name: str, tensor: torch.Tensor | None, *, is_buffer: bool
    ) -> None:
        if tensor is not None:
            self._places.setdefault(id(tensor), []).append((copy, name, is_buffer))
            self._keys.setdefault(id(copy), []).append(id(tensor))

    def _parameter(self, parameter: nn.Parameter) -> torch.Tensor:
        if id(parameter) not in self._stand_ins:
            self._stand_ins[id(parameter)] = parameter_like(parameter, "meta")
        return self._stand_ins[id(parameter)]

    def _buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        if id(buffer) not in self._stand_ins:
            is_small = not buffer.is_meta and buffer.numel() <= _SMALL_ELEMENTS
            copy = buffer.detach().clone() if is_small else torch.empty_like(buffer, device="meta")
            self._stand_ins[id(buffer)] = copy
        return self._stand_ins[id(buffer)]

    def _untie(self, module: nn.Module) -> None:
        """Hugging Face initialises every layer and ties after that: what is tied to another has
        values that are dropped, and must not be written over those of the other.
        """
        tied: Any = getattr(module, "all_tied_weights_keys", None)
        if not isinstance(tied, dict):
            return
        copy = self._copies[id(module)]
        for target, source in tied.items():
            owner, name = _owner_of(copy, target)
            kept, kept_name = _owner_of(copy, source)
            if owner is None or kept is None:
                continue
            parameter = owner._parameters.get(name)
            if parameter is None or parameter is not kept._parameters.get(kept_name):
                continue
            self._take_from(owner, name)
            owner._parameters[name] = parameter_like(parameter, "meta")

    def _take_from(self, owner: nn.Module, name: str) -> None:
        for key in self._keys[id(owner)]:
            if (owner, name, False) in self._places[key]:
                self._places[key].remove((owner, name, False))
                self._keys[id(owner)].remove(key)
                return


def parameter_like(parameter: torch.Tensor, device: str) -> nn.Parameter:
    """A parameter with the attributes that ``parameter`` was given, but for the mark that its
    values are there already.
    """
    like = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    attributes = getattr(parameter, "__dict__", {})
    like.__dict__.update({k: v for k, v in attributes.items() if k != MARK})
    return like


def _owner_of(module: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    path, _, own_name = name.rpartition(".")
    try:
        return module.get_submodule(path), own_name
    except AttributeError:
        return None, own_name
