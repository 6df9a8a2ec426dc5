"""Where the first values of a model come from: its own tensors, a file of weights, a checkpoint,
or its own initialisation.

Values are produced one module at a time, so a model on the meta device is never in memory as a
whole.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn
from tqdm import tqdm

from infinity.parameters.first_values import StoredValues, Values, ValueSource
from infinity.parameters.offloaded.placeholders import is_lost
from infinity.parameters.records import Record
from infinity.ranks.context import RankContext
from infinity.values.initial.file_windows import FileWindows
from infinity.values.initial.from_checkpoint import (
    CheckpointValues,
    Misfits,
    are_equal,
    check_fit,
    is_checkpoint,
    names_of,
    with_buffers,
)
from infinity.values.initial.initialisers import Initialisers
from infinity.values.initial.weight_files import WeightFolder, converts, listed
from infinity.values.initial.weight_names import Recipe, ignored_by, recipes_for, remedy_for
from swap.plain import same_bits
from swap.plan.rules import master_components
from swap.tiered import CHUNK_ELEMENTS, TieredState

_log = logging.getLogger(__name__)
_DELAY_SECONDS = 1.0
"""Before a bar is shown."""
Part = tuple[int, int, torch.Tensor]
"""A parameter, its first element that is meant, and values from there on."""


def values_for(
    model: nn.Module,
    records: Sequence[Record],
    weights: str | os.PathLike[str] | ValueSource | None,
) -> Values:
    """The source for ``model``. Raises ``ValueError``/``FileNotFoundError`` naming what has no
    values.
    """
    if isinstance(weights, ValueSource):
        return weights.values_for(model, records)
    if weights is not None:
        path = Path(weights)
        kind = CheckpointValues if is_checkpoint(path) else WeightFiles
        return kind(model, records, path)
    if any(record.parameter.is_meta for record in records):
        return Initialisation(model, records)
    return OwnValues()


class _Progress:
    """A bar on a terminal, from when it has taken long. None is made before, also none that shows
    nothing: an interrupt within tqdm's lock leaves it locked, and who makes a bar on another thread
    waits for ever.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._begin = time.monotonic()
        self._bar: tqdm[NoReturn] | None = None

    def update(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self._bar is not None:
            self._bar.update(nbytes)
        elif time.monotonic() - self._begin > _DELAY_SECONDS and _is_terminal(sys.stderr):
            self._bar = tqdm(
                total=self._total_bytes,
                initial=self._done_bytes,
                desc="offloading",
                unit="B",
                unit_scale=True,
                leave=False,
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _is_terminal(stream: object) -> bool:
    """Whether it is one, of what a program may have put in the place of ``sys.stderr``."""
    isatty = getattr(stream, "isatty", None)
    try:
        return isatty is not None and bool(isatty())
    except ValueError:  # it is closed
        return False


def fill_all(
    state: TieredState,
    records: Sequence[Record],
    values: Values,
    rank_context: RankContext,
    *,
    memory_bytes: int,
) -> None:
    """Bring all first values home, through ``memory_bytes``; shows progress when it takes long."""
    with closing(_Progress(sum(record.weight_bytes for record in records))) as progress:

        def parts() -> Iterator[Part]:
            for found, tensor in values.parameters(records):
                record = records[found.index]  # a source may know it as it was before it was cut
                read = _reader(state, record, rank_context.note(record, tensor))
                for start in range(0, record.spec.numel, CHUNK_ELEMENTS):
                    length = min(CHUNK_ELEMENTS, record.spec.numel - start)
                    yield record.index, start, read(start, length)
                progress.update(record.weight_bytes)

        state.fill_all(parts(), memory_bytes)


def _reader(
    state: TieredState, record: Record, values: torch.Tensor | StoredValues
) -> Callable[[int, int], torch.Tensor]:
    """Gives (first, how many) of its elements in a row."""
    if isinstance(values, torch.Tensor):
        flat = values.detach().reshape(-1)
        return lambda first, numel: flat[first : first + numel]
    dtype, components = record.spec.dtype, state.component_names(record.index)
    has_master = any(component.name in components for component in master_components(dtype))
    if has_master or dtype != values.source.dtype:
        values = values.exact()  # else what was computed with goes on, bit for bit
    return values.read


class OwnValues:
    """The tensors that the model came with."""

    def parameters(self, records: Sequence[Record]) -> Iterator[tuple[Record, torch.Tensor]]:
        for record in records:
            yield record, record.parameter

    def buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        return buffer


class Initialisation:
    """A model on meta, initialised as its modules would initialise themselves, but for what lost
    its values in an earlier block: that has none until it is loaded.
    """

    def __init__(self, model: nn.Module, records: Sequence[Record]) -> None:
        # Kept now: they may leave the model while it is offloaded, see ``tiling``.
        self._own = [list(module._parameters.values()) for module in model.modules()]
        self._initialisers = Initialisers(model)
        self._by_id = {id(record.parameter): record for record in records}
        lost = [record.parameter for record in records if is_lost(record.parameter)]
        self._lost = {id(parameter) for parameter in lost}  # the block begins without values of it
        on_meta = [record.parameter for record in records if self._is_drawn(record.parameter)]
        self._initialisers.check(on_meta)
        if on_meta:
            _log.warning(
                "%s begins with values that its modules draw for the %d parameters on the meta "
                "device: no weights= were given; with them, or with offloaded.load, it has those",
                type(model).__name__,
                len(on_meta),
            )
        self._initialisers.check_kept([r.parameter for r in records if not r.parameter.is_meta])
        for name, buffer in model.named_buffers():
            self.buffer(name, buffer)  # raises now, before anything is begun

    def parameters(self, records: Sequence[Record]) -> Iterator[tuple[Record, torch.Tensor]]:
        done: set[int] = set()
        for parameters in self._own:
            own = [p for p in parameters if p is not None and id(p) not in done]
            done.update(id(p) for p in own)
            missing = [p for p in own if self._is_drawn(p)]
            for parameter in own:
                if id(parameter) in self._lost:
                    yield self._by_id[id(parameter)], _nothing_like(parameter)
                elif not parameter.is_meta:
                    yield self._by_id[id(parameter)], parameter
            for parameter, values in zip(
                missing, self._initialisers.parameters(missing), strict=True
            ):
                yield self._by_id[id(parameter)], values

    def buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        return self._initialisers.buffer(name) if buffer.is_meta else buffer

    def _is_drawn(self, parameter: nn.Parameter) -> bool:
        return parameter.is_meta and id(parameter) not in self._lost


def _nothing_like(parameter: nn.Parameter) -> torch.Tensor:
    """In the place of values that nobody is given, see ``Mixture.begin_without``."""
    is_float = parameter.is_floating_point() or parameter.is_complex()
    nothing = torch.full((), float("nan") if is_float else 0, dtype=parameter.dtype, device="cpu")
    return nothing.expand(parameter.shape)


class WeightFiles:
    """Values from safetensors, see ``weight_files`` for which and ``weight_names`` for what becomes
    of them.

    Raises ``ValueError`` that names everything that is missing or has another shape; what the model
    has no use for is named in a warning.
    """

    def __init__(self, model: nn.Module, records: Sequence[Record], path: Path) -> None:
        explicit = getattr(getattr(model, "config", None), "transformers_weights", None)
        self._folder = WeightFolder(path, explicit=explicit)
        self._initialisers = Initialisers(model)
        names = {record.index: names_of(model, record) for record in records}
        shapes = _shapes(model)
        dtypes = {name: r.parameter.dtype for r in records for name in names[r.index]}
        recipes = recipes_for(self._initialisers.skeleton, {*shapes}, [*self._folder.names])
        self._made_by = _targets(recipes, self._folder, model)
        self._names = {
            index: [name for name in known if name in self._made_by]
            for index, known in names.items()
        }
        missing = [names[index][0] for index, found in self._names.items() if not found]
        wrong = [
            f"{name} ({tuple(made.shape)}, {tuple(shapes[name])} in the model)"
            for name, (_, made) in self._made_by.items()
            if name in dtypes and made.shape != shapes[name]
        ]
        foreign = [
            f"{name} ({made.dtype}, {dtypes[name]} in the model)"
            for name, (_, made) in self._made_by.items()
            if name in dtypes and not converts(made.dtype, dtypes[name])
        ]
        used = {name for recipe, _ in self._made_by.values() for name in recipe.stored}
        extra = [
            name for name in self._folder.names if name not in used and not ignored_by(model, name)
        ]
        stored = {name: made for name, (_, made) in self._made_by.items()}
        misfits = Misfits(missing, wrong, foreign, extra)
        check_fit(model, path, with_buffers(misfits, model, stored))

    @property
    def path(self) -> Path:
        return self._folder.path

    def parameters(
        self, records: Sequence[Record]
    ) -> Iterator[tuple[Record, torch.Tensor | StoredValues]]:
        """In the order of the files, which are read ahead of what is asked for."""
        by_name = {name: record for record in records for name in self._names[record.index]}
        done: set[int] = set()
        windows, beside = FileWindows(), FileWindows()
        try:
            for record in sorted(records, key=self._place):
                if record.index in done:
                    continue
                first, *others = self._names[record.index]
                made = self._made(first, windows)
                self._check_tied(first, made[first], others, beside)
                for name, values in made.items():
                    other = by_name.get(name)
                    if other is not None and other.index not in done:
                        done.add(other.index)
                        yield other, values
            self._folder.check_unchanged()
        finally:
            windows.close()
            beside.close()
            self._folder.close()

    def _place(self, record: Record) -> tuple[Path, int]:
        recipe, _ = self._made_by[self._names[record.index][0]]
        return self._folder.place(recipe.stored[0])

    def _made(
        self, name: str, windows: FileWindows
    ) -> Mapping[str, torch.Tensor] | Mapping[str, StoredValues]:
        """What the recipe for ``name`` makes: yet to be read, unless it takes whole tensors."""
        recipe, _ = self._made_by[name]
        if not recipe.is_name_alone:
            return recipe.make(self._folder.read)
        source = self._folder.stored(recipe.stored[0], windows)
        return {name: StoredValues(source, source.shape, origin="")}

    def buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """From the files if it is saved with the model; computed, or from the files, if not."""
        stored = self._made_by.get(name)
        is_saved = self._initialisers.is_saved(name)
        if stored is not None and is_saved:
            return self._read(stored[0], name, buffer.dtype)
        if not buffer.is_meta:
            return buffer
        try:
            return self._initialisers.buffer(name, not_in=self._folder.path)
        except ValueError:
            if stored is None:
                raise
        return self._read(stored[0], name, buffer.dtype)

    def _read(self, recipe: Recipe, name: str, dtype: torch.dtype) -> torch.Tensor:
        values = recipe.make(self._folder.read)[name].to(dtype)
        self._folder.check_unchanged()
        is_part = values.nbytes < values.untyped_storage().nbytes()
        return values.clone() if is_part else values

    def _check_tied(
        self,
        first: str,
        values: torch.Tensor | StoredValues,
        others: Sequence[str],
        windows: FileWindows,
    ) -> None:
        for name in others:
            other = self._made(name, windows)[name]
            if isinstance(values, StoredValues) and isinstance(other, StoredValues):
                is_equal = are_equal(values, other)
            else:
                is_equal = same_bits(_in_memory(values), _in_memory(other))
            if not is_equal:
                raise ValueError(
                    f"{first} and {name} are one tied parameter of the model and have different "
                    f"values in {self._folder.path}; build the model without tying them "
                    "(tie_word_embeddings=False)"
                )


def _in_memory(values: torch.Tensor | StoredValues) -> torch.Tensor:
    return values.whole() if isinstance(values, StoredValues) else values


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Of all parameters and buffers, by every name that they have."""
    shapes = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}
    return shapes | {name: b.shape for name, b in model.named_buffers(remove_duplicate=False)}


def _targets(
    recipes: Sequence[Recipe], folder: WeightFolder, model: nn.Module
) -> dict[str, tuple[Recipe, torch.Tensor]]:
    """What each recipe makes: tried on the meta device, which costs nothing."""
    made: dict[str, tuple[Recipe, torch.Tensor]] = {}
    for recipe in recipes:
        try:
            results = recipe.make(folder.on_meta)
        except Exception as error:  # whatever the conversions of transformers raise
            raise ValueError(
                f"{listed(recipe.stored)} of {folder.path} cannot be converted for "
                f"{type(model).__name__} ({type(error).__name__}: {error}); {remedy_for(model)}"
            ) from error
        made |= {name: (recipe, tensor) for name, tensor in results.items()}
    return made
