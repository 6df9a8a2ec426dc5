"""The first values that modules give themselves: by ``reset_parameters``, and by ``_init_weights``
of the model or a part of it (the convention of GPT implementations and of Hugging Face).

The functions run as they do for a model in memory: all of them, children before parents, each with
everything in its place. But only the parameters of one module are real at a time, the others are on
the meta device; so a model is never in memory as a whole. Which function writes to which tensor is
found by running each of them on the meta device first. What a constructor does besides is not known
here: a parameter that no function sets as a whole is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from infinity.values.initial.init_functions import MARK, Function, functions_of, makes_anywhere
from infinity.values.initial.skeleton import Skeleton, parameter_like
from infinity.values.initial.weight_files import listed

_FILLS = (0, 1)
"""What bytes of a buffer are before it is computed: what is the same after both was computed."""

_REMEDY = (
    "pass weights=, give it real values before (a parameter that is not on meta keeps its own), or "
    "build the model with real tensors"
)


class Initialisers:
    """Of ``model`` as it is now."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._modules = dict(model.named_modules())
        self._skeleton = Skeleton(model)
        self._writers: dict[int, list[int]] | None = None
        self._functions: list[Function] = []
        self._buffers: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def skeleton(self) -> nn.Module:
        """The model without values, also after layers have left it."""
        return self._skeleton.model

    def is_saved(self, name: str) -> bool:
        """Whether a state dict of the model has this buffer."""
        path, _, own_name = name.rpartition(".")
        return own_name not in self._modules[path]._non_persistent_buffers_set

    def check(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise ``ValueError`` naming parameters that no function writes to."""
        writers = self._observed()
        without = [self._names[id(p)] for p in parameters if id(p) not in writers]
        if without:
            raise ValueError(
                f"{listed(without)} is on the meta device and has no reset_parameters() or "
                f"_init_weights() that sets it; {_REMEDY}"
            )

    def check_kept(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise ``ValueError`` naming one of these, which are in memory, that nothing was written
        to: Hugging Face initialises no model that is built on the meta device, be some of its
        parameters not there.
        """
        kept = {id(parameter): parameter for parameter in parameters}
        for module in self._modules.values():
            own = [p for p in module._parameters.values() if p is not None and id(p) in kept]
            unwritten = [p for p in own if p._version == 0 and self._was_skipped(p)]
            if not unwritten or module.__dict__.get(MARK) or not makes_anywhere(module):
                continue
            raise ValueError(
                f"{listed([self._names[id(p)] for p in unwritten])} has no values: "
                f"{type(module).__name__} made it in memory although the model was built on the "
                "meta device, where _init_weights() is not called; call model.to('meta') to have "
                "all of the model initialised, or pass weights=, or, to keep values that you gave "
                "it, write them in place: `with torch.no_grad(): parameter.copy_(values)`"
            )

    def _was_skipped(self, parameter: nn.Parameter) -> bool:
        writers = self._observed().get(id(parameter), ())
        return any(self._functions[number].skips_meta for number in writers)

    @torch.no_grad()
    def parameters(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Values for these, which are in memory at once: usually those of one module.

        Raises ``ValueError`` naming one that is not set as a whole.
        """
        real = {id(parameter): _unset(parameter) for parameter in parameters}
        functions = self._that_write(real)
        with self._skeleton.holding(real):
            self._run(functions, real)
            found = [self._skeleton.now(key) for key in real]
        for key, value in zip(real, found, strict=True):
            if value is None or value.is_meta or not _is_set(value):
                raise ValueError(
                    f"{self._names[key]} is on the meta device, and not all of it is set by "
                    f"reset_parameters() or _init_weights(); {_REMEDY}"
                )
        return [value.detach() for value in found if value is not None]

    def buffer(self, name: str, *, not_in: Path | None = None) -> torch.Tensor:
        """A buffer on meta as its module computes it, such as rotary frequencies.

        ``not_in``: weights that would hold it if it was saved with the model. Raises ``ValueError``
        if it was, and if the module does not compute all of it.
        """
        path, _, own_name = name.rpartition(".")
        module = self._modules[path]
        if not_in is not None and self.is_saved(name):
            raise ValueError(f"buffer {name} is on the meta device and not in {not_in}")
        if path not in self._buffers:
            self._buffers[path] = self._computed_buffers(module)
        found = self._buffers[path].get(own_name)
        if found is None:
            raise ValueError(
                f"buffer {name} is on the meta device and has no values: {type(module).__name__} "
                "does not set it in reset_parameters(), nor the model in _init_weights(); pass "
                "weights= that hold it, or build it with a real device: `with "
                "torch.device('cpu')` around its creation"
            )
        return found

    @torch.no_grad()
    def _computed_buffers(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Those that are the same whatever was there before. Random states and what is not on meta
        stay as they are.
        """
        keys = self._skeleton.buffers_on_meta(module)
        functions = self._that_write([key for key, _ in keys.values()])
        results: list[dict[str, torch.Tensor | None]] = []
        for fill in _FILLS:
            real = {key: _filled(stand_in, fill) for key, stand_in in keys.values()}
            with self._skeleton.holding(real), torch.random.fork_rng(devices=[]):
                try:
                    self._run(functions, real)
                except ValueError:
                    return {}  # who wants one of these hears that it has no values
                results.append({name: self._skeleton.now(key) for name, (key, _) in keys.items()})
        first, second = results
        return {
            name: value
            for name, value in first.items()
            if value is not None and _same_bytes(value, second[name])
        }

    def _that_write(self, keys: Iterable[int]) -> list[Function]:
        """Every function that writes to one of these tensors, in order."""
        writers = self._observed()
        numbers = sorted({number for key in keys for number in writers.get(key, ())})
        return [self._functions[number] for number in numbers]

    def _run(self, functions: Sequence[Function], real: Mapping[int, torch.Tensor]) -> None:
        """Raises ``ValueError`` for one that fails where nothing but ``real`` is in memory."""
        for function in functions:
            try:
                with torch.device("cpu"):
                    function.run()
            except Exception as error:  # whatever the functions of somebody's model raise
                names = [self._names.get(key, "a buffer") for key in real]
                raise ValueError(
                    f"{listed(names)} cannot be initialised without other parts of the model in "
                    f"memory ({type(error).__name__}: {error}); {_REMEDY}"
                ) from error
            finally:
                others = self._skeleton.stand_ins(function.module).keys() - real.keys()
                self._skeleton.restore(others)

    def _observed(self) -> dict[int, list[int]]:
        """For each tensor, by identity, the functions that write to it, as numbers."""
        if self._writers is None:
            self._functions = functions_of(self._skeleton.model)
            self._writers = {}
            with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
                for number, function in enumerate(self._functions):
                    for key in self._written_by(function):
                        self._writers.setdefault(key, []).append(number)
        return self._writers

    def _written_by(self, function: Function) -> set[int]:
        """Of a function that fails on the meta device, but may work where something is real, it is
        everything in its module.
        """
        before = self._skeleton.stand_ins(function.module)
        storages = {tensor.untyped_storage()._cdata: key for key, tensor in before.items()}
        try:
            with _Writes() as writes, _Questions() as questions:
                function.run()
        except Exception:  # it is raised when somebody wants what the function may set
            return {*before}
        else:
            noted = writes.storages | questions.storages
            written = {storages[storage] for storage in noted if storage in storages}
            return written | {
                key
                for key, tensor in before.items()
                if self._skeleton.now(key) is not tensor
                or tensor.untyped_storage()._cdata not in storages
            }
        finally:
            self._skeleton.restore(before)


class _Writes(TorchDispatchMode):
    """Notes the storage of every tensor that an operation changes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor):
                    self.storages.add(tensor.untyped_storage()._cdata)
        return func(*args, **kwargs)


class _Questions(TorchFunctionMode):
    """Notes the storage of every tensor that is asked where it is: ``trunc_normal_`` and others do
    nothing to one on meta, and might to a real one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WHERE:
            self.storages.add(args[0].untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))


_WHERE: tuple[Any, ...] = tuple(
    getattr(torch.Tensor, name).__get__ for name in ("is_meta", "device")
)


def _unset(parameter: nn.Parameter) -> nn.Parameter:
    """On the CPU; where a number can say so, its values say that they are none."""
    real = parameter_like(parameter, "cpu")
    if _can_be_nan(real):
        real.fill_(torch.nan)
    return real


def _is_set(value: torch.Tensor) -> bool:
    # The least of values is NaN if one of them is, and takes no memory.
    return not _can_be_nan(value) or not value.numel() or not bool(value.min().isnan())


def _can_be_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.itemsize > 1


def _filled(buffer: torch.Tensor, fill: int) -> torch.Tensor:
    real = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    real.reshape(-1).view(torch.uint8).fill_(fill)
    return real


def _same_bytes(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    if b is None or a.shape != b.shape or a.dtype != b.dtype or a.is_meta or b.is_meta:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Of a copy, as what has any stride is no row of bytes, be it of one element."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
