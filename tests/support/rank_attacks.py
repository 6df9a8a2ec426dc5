"""What goes wrong on single ranks in tests besides ``rank_jobs.mistakes``."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import checkpoint
import infinity
from aio import AioError
from infinity.autograd.kept_views import KeptViews
from infinity.autograd.modifying import Loans
from infinity.ranks import reductions
from infinity.ranks.collectives import GATHER, LOAD, NORM, REDUCE, SAVE, VALUES, Ranks, Transfer
from infinity.ranks.zero3 import Zero3
from infinity.training import Training
from swap.storage.extents import ExtentStore
from swap.tiered import TieredState
from swap.update.stages import Stages
from tests.support.models import first_weight, seeded, vector_loss
from tests.support.rank_jobs import complaint, gpt, least_budget, loss_of, stack, world


def absences(rank: int, folder: Path) -> dict[str, str]:
    """What this rank is told where rank 1 does not come, does something else, or where a file of
    its part of a checkpoint is gone.
    """
    told: dict[str, str] = {}
    path = folder / "checkpoint"

    def train(*, load: bool = False, save: bool = False, extra_steps: int = 0) -> None:
        model = stack()
        with infinity.offload(
            model, folder, host_memory="256MiB", process_group=world()
        ) as offloaded:
            if load:
                offloaded.load(path)
            for number in range(1 + extra_steps):
                vector_loss(model, number).backward()
                offloaded.step()
            if save:
                offloaded.save(path)

    train(save=True)
    odd = rank == 1
    told["more steps"] = complaint(lambda: train(extra_steps=int(odd)))
    told["no load"] = complaint(lambda: train(load=not odd))
    told["no save"] = complaint(lambda: train(save=not odd))

    coordinator = checkpoint.GroupCoordinator(timeout_seconds=1)
    manager = checkpoint.Manager(folder, coordinator=coordinator)
    if not odd:
        told["nobody at load"] = complaint(manager.load)
        told["nobody again"] = complaint(manager.latest)
    dist.barrier()
    if rank == 0:
        (file,) = path.rglob("r1-0.safetensors")
        file.unlink()
    dist.barrier()
    told["file"] = complaint(lambda: train(load=True))
    told["nothing"] = complaint(train)
    return told


def full_disks(rank: int, folder: Path) -> dict[str, str]:
    """Rank 1 has no room for its swap file; then it has."""
    model = seeded(gpt)
    host_memory = least_budget(gpt, folder)

    def train() -> None:
        with infinity.offload(
            model, folder, host_memory=host_memory, process_group=world()
        ) as offloaded:
            loss_of(model, rank).backward()
            offloaded.step()

    with _file_size_limit(1 << 20) if rank == 1 else _file_size_limit(resource.RLIM_INFINITY):
        told = {"full": complaint(train)}
    told["then"] = complaint(train)
    return told


def unfinished_steps(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1 cannot write what the last step makes of the state that it keeps on NVMe."""
    host_memory = least_budget(partial(stack, 768), folder)
    models = [stack(768), stack(768)]

    def train(model: nn.Module) -> None:
        with infinity.offload(
            model, folder, host_memory=host_memory, process_group=world()
        ) as offloaded:
            vector_loss(model, 0, width=768).backward()
            offloaded.step()

    def fail(stages: Stages, *arguments: Any) -> None:
        raise AioError("full", errno=errno.ENOSPC, filename="state.swap")

    with patch.object(Stages, "_allocate", fail) if rank == 1 else nullcontext():
        told = {"full": complaint(lambda: train(models[0]))}
    told["then"] = complaint(lambda: train(models[1]))
    given = {name: p for name, p in models[0].named_parameters() if not p.is_meta}
    expected = dict(models[1].named_parameters())
    return told | {
        "on meta": sorted(expected.keys() - given.keys()),
        "other": [name for name, p in given.items() if not torch.equal(p, expected[name])],
    }


def unkept_changes(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1 cannot write what `gathered` is to keep of a weight; then it can."""
    model = stack(768)
    host_memory = least_budget(partial(stack, 768), folder)
    write, fails = ExtentStore.write, False

    def write_or_fail(store: ExtentStore, *arguments: Any) -> Any:
        nonlocal fails
        if fails:
            fails = False
            raise AioError("full", errno=errno.ENOSPC, filename="state.swap")
        return write(store, *arguments)

    def change(offloaded: infinity.OffloadedModel, *, is_full: bool) -> None:
        nonlocal fails
        with offloaded.gathered(weight, modify=True):
            torch.nn.init.ones_(weight)
            fails = is_full

    def changed(offloaded: infinity.OffloadedModel) -> float:
        with offloaded.gathered(weight):
            return (weight == 1).float().mean().item()

    weight = first_weight(model)
    with (
        patch.object(ExtentStore, "write", write_or_fail),
        infinity.offload(
            model, folder, host_memory=host_memory, process_group=world()
        ) as offloaded,
    ):
        told = {"full": complaint(lambda: change(offloaded, is_full=rank == 1))}
        shares = [changed(offloaded)]
        told["then"] = complaint(lambda: change(offloaded, is_full=False))
        shares.append(changed(offloaded))
    return told | {"changed": shares}


def interrupted_change(rank: int, folder: Path) -> dict[str, Any]:
    """Ctrl-C comes to both ranks as `gathered` keeps a weight: to rank 0 while it reads what there
    was, to rank 1 while it writes.
    """
    model = stack(768)
    host_memory = least_budget(partial(stack, 768), folder)
    weight, name = first_weight(model), ("read_values", "fill")[rank]
    function, interrupts = getattr(TieredState, name), False

    def interrupted(state: TieredState, *arguments: Any) -> Any:
        nonlocal interrupts
        if interrupts:
            interrupts = False
            os.kill(os.getpid(), signal.SIGINT)
        return function(state, *arguments)

    told: dict[str, Any] = {"interrupted": False}
    with (
        patch.object(TieredState, name, interrupted),
        infinity.offload(
            model, folder, host_memory=host_memory, process_group=world()
        ) as offloaded,
    ):
        try:
            with offloaded.gathered(weight, modify=True):
                torch.nn.init.ones_(weight)
                interrupts = True
        except KeyboardInterrupt:
            told["interrupted"] = True
        with offloaded.gathered(weight):
            told["changed"] = (weight == 1).float().mean().item()
        vector_loss(model, 0, width=768).backward()
        offloaded.step()
    return told


def interrupted_ends(rank: int, folder: Path) -> dict[str, list[Any]]:
    """Ctrl-C comes to rank 1, or to both, as the block ends by itself: before the ranks meet, as
    they have met, and as they have for a weight. By the place and the ranks that it comes to:
    whether this one is told of that alone, and whether the model has its values.
    """
    places = {
        "loans": (Loans, "take_in_left"),
        "leave": (Zero3, "meet"),
        "values": (Zero3, "_whole"),
    }
    expected = dict(_ended(folder, nullcontext()).named_parameters())
    told: dict[str, list[Any]] = {}
    for place, (owner, name) in places.items():
        for wanted in ([1], [0, 1]):
            comes = _interrupt_behind(owner, name) if rank in wanted else nullcontext()
            model, heard = stack(768), ""
            try:
                _ended(folder, comes, model)
            except (KeyboardInterrupt, checkpoint.RankFailedError) as error:
                heard = type(error).__name__
            given = [
                not p.is_meta and torch.equal(p, expected[k]) for k, p in model.named_parameters()
            ]
            is_right = heard == ("KeyboardInterrupt" if rank in wanted else "")
            told[f"{place} {wanted}"] = [is_right, all(given)]
    return told


def half_taken_step(rank: int, folder: Path) -> dict[str, Any]:
    """Ctrl-C keeps rank 1 from a step that rank 0 takes, and both go on."""
    model = stack(768)
    weight, before = first_weight(model), first_weight(model).detach().clone()
    told: dict[str, Any] = {"interrupted": False, "changed": []}
    with infinity.offload(model, folder, host_memory="256MiB", process_group=world()) as offloaded:
        vector_loss(model, 0, width=768).backward()
        comes = _interrupt_behind(KeptViews, "find") if rank == 1 else nullcontext()
        try:
            with comes:
                offloaded.step()
        except KeyboardInterrupt:
            told["interrupted"] = True

        def look() -> None:
            with offloaded.gathered(weight):
                told["changed"].append((weight != before).float().mean().item())

        told["then"] = complaint(look)
    return told


def other_values(rank: int, folder: Path) -> dict[str, str]:
    """Rank 1 reads a weight, twice, that rank 0 changes."""
    model = stack(768)

    def differ() -> None:
        with infinity.offload(
            model, folder, host_memory="256MiB", process_group=world()
        ) as offloaded:
            for is_changed in (rank == 0, False):
                with offloaded.gathered(first_weight(model), modify=is_changed):
                    pass

    return {"told": complaint(differ)}


def interrupted_meetings(rank: int, folder: Path) -> dict[str, str]:
    """Ctrl-C comes to rank 1 behind a meeting, and both go on. What each is told, by what ranks
    have met for.
    """

    def train(kind: int) -> None:
        model = stack(768)
        comes = _interrupt_behind(Ranks, "meet", lambda given: given[1] == kind)
        with infinity.offload(
            model, folder, host_memory="256MiB", process_group=world()
        ) as offloaded:
            with suppress(KeyboardInterrupt), comes if rank == 1 else nullcontext():
                vector_loss(model, 0, width=768).backward()
                offloaded.step()
                with offloaded.gathered():
                    pass
            with offloaded.gathered():
                pass

    kinds = {"gather": GATHER, "reduce": REDUCE, "norm": NORM, "values": VALUES}
    return {name: complaint(partial(train, kind)) for name, kind in kinds.items()}


def interrupted_means(rank: int, folder: Path) -> dict[str, list[Any]]:
    """Ctrl-C comes to both ranks as a step waits for the gradients of the last of two passes, and
    the step is taken again. By the place: whether it came, and whether all is as without it, or
    what is said.
    """

    def train(comes: AbstractContextManager[None]) -> tuple[nn.Module, bool]:
        model, is_heard = stack(768), False
        with infinity.offload(
            model, folder, host_memory="256MiB", process_group=world()
        ) as offloaded:
            for number in range(2):
                vector_loss(model, number, width=768).backward()
            try:
                with comes:
                    offloaded.step()
            except KeyboardInterrupt:
                is_heard = True
                offloaded.step()
        return model, is_heard

    expected = dict(train(nullcontext())[0].named_parameters())
    told: dict[str, list[Any]] = {}
    for name, place in {
        "slices": (Transfer, "wait"),
        "means": (reductions, "mean_of"),
        "bucket": (Ranks, "gather"),
    }.items():
        given: list[bool] = []

        def look(place: tuple[Any, str] = place, given: list[bool] = given) -> None:
            model, is_heard = train(_interrupt_behind(*place))
            given.append(is_heard)
            given.append(all(torch.equal(p, expected[k]) for k, p in model.named_parameters()))

        said = complaint(look)
        told[name] = [*given, said]
    return told


def interrupted_calls(rank: int, folder: Path) -> dict[str, list[Any]]:
    """Ctrl-C comes to rank 1 behind what ranks meet for as they save or load, and as all is loaded;
    both do the same again. What each is told of the first, of the second and of the block.
    """

    def again(place: tuple[Any, ...], told: list[str], *, saves: bool) -> None:
        model = stack(768)
        with infinity.offload(
            model, folder, host_memory="256MiB", process_group=world()
        ) as offloaded:
            vector_loss(model, 0, width=768).backward()
            offloaded.step()
            offloaded.save(folder / "checkpoint")
            call = partial((offloaded.save if saves else offloaded.load), folder / "checkpoint")
            try:
                with _interrupt_behind(*place) if rank == 1 else nullcontext():
                    told.append(complaint(call))
            except KeyboardInterrupt:
                told.append("interrupted")
            told.append(complaint(call))

    places = {
        "save": ((Zero3, "meet", lambda given: given[1] == SAVE), True),
        "load": ((Zero3, "meet", lambda given: given[1] == LOAD), False),
        "loaded": ((Training, "loaded"), False),
    }
    outcomes: dict[str, list[Any]] = {}
    for name, (place, saves) in places.items():
        told: list[str] = []
        told.append(complaint(partial(again, place, told, saves=saves)))
        outcomes[name] = told
    return outcomes


def _ended(
    folder: Path, at_end: AbstractContextManager[None], model: nn.Module | None = None
) -> nn.Module:
    """A model after a step in a block; ``at_end`` is around the end of that."""
    trained = stack(768) if model is None else model
    with ExitStack() as around:
        offloaded = around.enter_context(
            infinity.offload(trained, folder, host_memory="256MiB", process_group=world())
        )
        vector_loss(trained, 0, width=768).backward()
        offloaded.step()
        offloaded.flush()
        with at_end:
            around.close()
    return trained


@contextmanager
def _interrupt_behind(
    owner: Any, name: str, where: Callable[[tuple[Any, ...]], bool] = lambda given: True
) -> Iterator[None]:
    """Ctrl-C behind the first call of that method of ``owner`` with such arguments."""
    function, comes = getattr(owner, name), [True]

    def interrupted(*arguments: Any) -> Any:
        result = function(*arguments)
        if comes and where(arguments):
            comes.clear()
            os.kill(os.getpid(), signal.SIGINT)
        return result

    with patch.object(owner, name, interrupted):
        yield


@contextmanager
def _file_size_limit(nbytes: int) -> Iterator[None]:
    """No file of this process gets longer."""
    before: Any = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
