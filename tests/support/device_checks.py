"""What holds for training on a device, whichever: ``tests/gpu`` has it checked on a GPU,
``tests/infinity/test_device_checks.py`` on a CPU.

Each takes the device and an empty folder, and raises ``AssertionError``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import checkpoint
import infinity
from swap.device.interface import ComputeDevice, Stream
from swap.device.opening import DEVICES
from swap.device.visits import Pace, Visits
from tests.support.device_runs import (
    AMPLE,
    LR,
    Case,
    block_of,
    budgets,
    offloaded_run,
    run_in_memory,
    run_with_update_of_torch,
    train,
    train_rank,
)
from tests.support.ranks import run_ranks
from tests.support.simulated_device import SimulatedDevice
from tests.support.training import Outcome, assert_same_runs, same_values, values_of

BITS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16, "clip": 0.5},
    "float16": {"dtype": torch.float16, "clip": 0.5, "steps": 6},
    "accumulated": {"accumulate": 3, "steps": 3, "clip": 0.5},
    "recomputed": {"recompute": "non-reentrant"},
    "recomputed-reentrant": {"recompute": "reentrant"},
    "activations-on-host": {"options": {"activations": "host"}},
    "activations-on-nvme": {"options": {"activations": "nvme"}},
    "without-overlap": {"options": {"overlap": False}},
}
"""Cases that have the bits of training in device memory, under every budget."""


def check_bits(name: str, device: str, folder: Path) -> None:
    """Offloaded, a case has the bits that it has in the memory of the device."""
    case = Case(device=device, **BITS[name])
    runs = {"in memory": run_in_memory(case)}
    planned = replace(case, options={k: v for k, v in case.options.items() if k != "overlap"})
    for budget, memory in budgets(planned, folder).items():
        runs[budget] = offloaded_run(case, folder, memory)
    assert_same_runs(runs)
    assert runs["least"].read_bytes > 0
    if case.dtype == torch.float16:
        norms = runs["in memory"].norms
        assert float("inf") in norms, "no step overflowed, so nothing is known of one that does"
        assert norms[-1] < float("inf")


def check_bits_of_torch(device: str, folder: Path) -> None:
    """In float32 they are those of torch's fused AdamW on the CPU, by gradients of the device."""
    case = Case(device=device, dtype=torch.float32)
    runs = {"torch": run_with_update_of_torch(case)}
    for budget, memory in budgets(case, folder).items():
        runs[budget] = offloaded_run(case, folder, memory)
    assert_same_runs(runs)


def check_visits(device: str, folder: Path) -> None:
    """So has training whose state is at home in host memory, and updated on the device."""
    memory = {"host_memory": "2GiB", "device_memory": "40MiB"}
    for dtype in (torch.float32, torch.bfloat16):  # float16 has no updates before its steps
        case = Case(device=device, dtype=dtype, clip=0.5)
        runs = {"in memory": run_in_memory(case)}
        with (
            patch("swap.plan.spares._VISIT_SHARE", 8.0),
            patch.object(Pace, "is_sooner_there", lambda *_: True),
            patch.object(Visits, "begin", autospec=True, side_effect=Visits.begin) as begin,
        ):
            runs["visiting"] = offloaded_run(case, folder, memory)
        assert begin.call_count or torch.device(device).type not in DEVICES
        assert_same_runs(runs)


def check_compiled(device: str, folder: Path) -> None:
    """Compiled blocks have the bits that they have in the memory of the device."""
    case = Case(device=device, compiles=True, steps=3)
    runs = {"in memory": run_in_memory(case)}
    for budget, memory in budgets(case, folder).items():
        runs[budget] = offloaded_run(case, folder, memory)
    assert_same_runs(runs)


def check_runs_go_on_elsewhere(device: str, folder: Path) -> None:
    """What was saved on the device is loaded bit by bit on the CPU, and the other way round."""
    for first, then in ((device, "cpu"), ("cpu", device)):
        path = folder / f"from-{first}-to-{then}"
        case, other = Case(device=first), Case(device=then)
        with block_of(case, case.model(), folder, AMPLE) as offloaded:
            train(case, offloaded, range(3))
            offloaded.save(path, extra={"step": 3})
            expected = _values(offloaded)
        least = budgets(other, folder)["least"]
        with block_of(other, other.model(), folder, least) as offloaded:
            assert offloaded.load(path) == {"step": 3}
            assert same_values(_values(offloaded), expected)
            on_there = train(other, offloaded, range(3, 5))
        with block_of(other, other.model(), folder, AMPLE) as offloaded:
            offloaded.load(path)
            assert_same_runs({"least": on_there, "ample": train(other, offloaded, range(3, 5))})


def check_snapshots(device: str, folder: Path) -> None:
    """A restored run goes on with the bits of the first time, in another block, too."""
    case = Case(device=device, clip=0.5)
    for name, memory in budgets(case, folder).items():
        runs: dict[str, Outcome] = {}
        with block_of(case, case.model(), folder, memory) as offloaded:
            train(case, offloaded, range(2))
            offloaded.snapshot(name)
            runs["first"] = train(case, offloaded, range(2, 4))
            offloaded.restore(name)
            runs["restored"] = train(case, offloaded, range(2, 4))
        with block_of(case, case.model(), folder, memory) as offloaded:
            offloaded.restore(name)
            runs["in another block"] = train(case, offloaded, range(2, 4))
            offloaded.drop_snapshot(name)
        assert_same_runs({key: replace(run, read_bytes=0) for key, run in runs.items()})


def check_gathered(device: str, folder: Path) -> None:
    """Gathered parameters are real tensors of the device; what is changed there is kept."""
    case = Case(device=device, dtype=torch.float32)
    model = case.model()
    before = values_of(model)
    with block_of(case, model, folder, budgets(case, folder)["least"]) as offloaded:
        weight = model.blocks[1].get_parameter("up.weight")
        with offloaded.gathered([weight]):
            assert weight.device.type == torch.device(device).type
            assert torch.equal(weight.detach().cpu(), before["blocks.1.up.weight"])
        with offloaded.gathered([weight], modify=True), torch.no_grad():
            weight.mul_(2.0)
        loss = case.loss(model, 0)
        values = _values(offloaded)
    assert torch.equal(values["blocks.1.up.weight"], 2.0 * before["blocks.1.up.weight"])
    twin = case.model(device)
    with torch.no_grad():
        twin.blocks[1].get_parameter("up.weight").mul_(2.0)
    assert case.loss(twin, 0).item() == loss.item()


def check_inference(device: str, folder: Path) -> None:
    """Without an optimizer, passes have the bits that they have in the memory of the device."""
    case = Case(device=device)
    twin = case.model(device).to(case.dtype)
    with torch.no_grad():
        expected = [case.loss(twin, number).item() for number in range(3)]
    options: dict[str, Any] = {"optimizer": None, "device": device, "compute_dtype": case.dtype}
    plan = infinity.plan(case.model(), host_memory=1, **options)
    least = {"host_memory": plan.least_host_bytes, "device_memory": plan.least_device_bytes}
    for memory in (AMPLE, least):
        model = case.model()
        with infinity.offload(model, folder, **options, **memory), torch.no_grad():
            assert [case.loss(model, number).item() for number in range(3)] == expected


def check_kept_views(device: str, folder: Path) -> None:
    """A view of a weight that the program keeps over a step is refused by name, not old."""
    case = Case(device=device, dtype=torch.float32)
    model, kept = case.model(), list[torch.Tensor]()
    name = "blocks.1.up"
    model.get_submodule(name).register_forward_hook(
        lambda module, *_: kept.append(module.get_parameter("weight").detach().flatten()[:7])
    )
    for memory in budgets(case, folder).values():
        kept.clear()
        with block_of(case, model, folder, memory) as offloaded:
            before = _values(offloaded)[f"{name}.weight"].flatten()[:7]
            loss = case.loss(model, 0)
            assert torch.equal(kept[0].cpu(), before)
            offloaded.backward(loss)
            offloaded.step()
            with pytest.raises(RuntimeError, match=name):
                kept[0].cpu()


def check_model_of_the_device(device: str, folder: Path) -> None:
    """A model that came with its values on the device is there again afterwards, trained."""
    case = Case(device=device, dtype=torch.float32, steps=2)
    expected = run_in_memory(case)
    model = case.model(device)
    with block_of(case, model, folder, budgets(case, folder)["least"]) as offloaded:
        train(case, offloaded, range(case.steps))
    assert {p.device.type for p in model.parameters()} == {torch.device(device).type}
    values = {name: value.cpu() for name, value in values_of(model).items()}
    assert same_values(values, expected.values)


def check_adamw(device: str, folder: Path) -> None:
    """``OffloadedAdamW`` on parameters of the device has one set of bits under every budget, and in
    float32 those of torch's fused AdamW on the CPU.
    """
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(device=device, dtype=dtype)
        found = [_with_offloaded_adamw(case, folder, budget) for budget in ("1GiB", 12 << 20)]
        assert same_values(*found)
        if dtype == torch.float32:
            assert same_values(found[0], run_with_update_of_torch(case).values)


def _with_offloaded_adamw(
    case: Case,
    folder: Path,
    host_memory: int | str,
    step: Callable[[infinity.OffloadedAdamW], object] = infinity.OffloadedAdamW.step,
) -> dict[str, torch.Tensor]:
    model: nn.Module = case.model(case.device).to(case.dtype)
    parameters = list(model.parameters())
    with infinity.OffloadedAdamW(
        parameters, lr=LR, nvme=folder, host_memory=host_memory
    ) as optimizer:
        for number in range(case.steps):
            case.loss(model, number).backward()
            step(optimizer)
            optimizer.zero_grad()
        assert (optimizer.report().nvme_bytes > 0) == (host_memory != "1GiB")
    return {name: value.cpu() for name, value in values_of(model).items()}


def check_adamw_stopped(device: str, folder: Path) -> None:
    """A step of ``OffloadedAdamW`` in which a copy of new weights to the device fails is finished
    by ``flush`` with the same bits, also on a stream of the program's own.
    """
    case = Case(device=device, steps=3)
    expected = _with_offloaded_adamw(case, folder, "1GiB")
    kind = torch.device(device).type
    opened = DEVICES.get(kind, lambda _: SimulatedDevice())
    num_calls = 0

    def fails_once(given: torch.device) -> ComputeDevice:
        made = opened(given)
        copy = made.copy

        def fail(stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
            nonlocal num_calls
            num_calls += stream is Stream.UP
            if stream is Stream.UP and num_calls == 3:
                raise RuntimeError("the device failed")
            copy(stream, target, source)

        made.copy = fail
        return made

    def step(optimizer: infinity.OffloadedAdamW) -> None:
        try:
            optimizer.step()
        except RuntimeError as error:
            if str(error) != "the device failed":
                raise
            optimizer.flush()

    own = torch.cuda.stream(torch.cuda.Stream(device)) if kind == "cuda" else nullcontext()
    with patch.dict(DEVICES, {kind: fails_once}), own:
        assert same_values(_with_offloaded_adamw(case, folder, 12 << 20, step), expected)
    assert num_calls > 3


def check_saves(device: str, folder: Path) -> None:
    """Trees of tensors on the device are saved as they were at the call, and loaded to where they
    are wanted.
    """
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(700, 1000, generator=generator)
    state = {
        "wide": wide.to(device),
        "transposed": wide.to(device).T,
        "every other": wide.to(device)[::2, 1:],
        "half": wide.to(device).bfloat16(),
        "none": torch.empty(0, 3, device=device),
        "one": torch.tensor(3.0, device=device),
    }
    expected = {name: tensor.cpu().clone() for name, tensor in state.items()}
    checkpoint.save(state, folder / "a")
    pending = checkpoint.save_async(state, folder / "b")
    for tensor in state.values():
        tensor.zero_()  # the copy of before is what counts
    pending.result()
    for name in ("a", "b"):
        assert same_values(checkpoint.load(folder / name), expected)
        there = checkpoint.load(folder / name, map_location=device)
        assert {tensor.device.type for tensor in there.values()} == {torch.device(device).type}
        assert same_values({key: tensor.cpu() for key, tensor in there.items()}, expected)
    checkpoint.load(folder / "a", into=state)
    # Those that share memory with others hold what was loaded last.
    assert torch.equal(state["half"].cpu(), expected["half"])


def check_guarded_save(device: str, folder: Path) -> None:
    """A save with a guard has the values from before the guard's next step."""
    case = Case(device=device, dtype=torch.float32)
    model = case.model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(3):
        case.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        pending = checkpoint.save_async(state, folder / f"{step}", guard=optimizer)
        case.loss(model, step + 1).backward()
        optimizer.step()
        optimizer.zero_grad()
        pending.result()
        saved: Any = checkpoint.load(folder / f"{step}", only=["model.*"])
        assert same_values({key: value.cpu() for key, value in saved["model"].items()}, expected)


def check_ranks(device: str, folder: Path, backend: str = "gloo") -> None:
    """Two ranks have one set of values, which is that of a process that accumulates the batches of
    both: two gradients are added with one rounding, and the mean of two is exact.
    """
    run_ranks(train_rank, folder / "ranks", 2, device=device, backend=backend, timeout_seconds=60.0)
    case = Case(device=device, clip=0.5, accumulate=2)
    expected = offloaded_run(case, folder, AMPLE).values
    for rank in range(2):
        values = torch.load(folder / "ranks" / f"values-{rank}", weights_only=True)
        assert same_values(values, expected)


def _values(offloaded: infinity.OffloadedModel) -> dict[str, torch.Tensor]:
    with offloaded.gathered():
        return {name: value.cpu().clone() for name, value in values_of(offloaded.model).items()}
