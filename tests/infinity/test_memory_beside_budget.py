"""Host memory beside the budget: what the C library's allocator keeps of freed gradients."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import infinity
from checkpoint.plan.write_runs import Slots, plan_slots
from swap.memory import heap
from tests.support.training import budgets

MARGIN_BYTES = 12 << 20
"""For what is no part of the budget: objects of Python and of torch, stacks, a gradient."""

# Layers of 1 MiB: the first gradients that are freed raise glibc's threshold above their size.
_TRAIN = """
import gc, sys, tempfile
import torch
import infinity
from swap.tiers import BudgetError

torch.set_num_threads(1)
LAYERS, WIDTH = 64, 512

def anonymous_bytes():
    with open("/proc/self/status") as lines:
        return sum(int(x.split()[1]) for x in lines if x.startswith(("RssAnon", "RssShmem"))) << 10

warm = torch.nn.Linear(8, 8)
warm(torch.ones(1, 8)).sum().backward()
torch.optim.AdamW(warm.parameters()).step()
with torch.device("meta"):
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
batch = torch.ones(4, WIDTH)
with tempfile.TemporaryDirectory(dir=sys.argv[1]) as nvme:
    try:
        with infinity.offload(model, nvme, host_memory=1):
            pass
    except BudgetError as error:
        least = error.least_host_bytes
    gc.collect()
    before, peak = anonymous_bytes(), 0
    with infinity.offload(model, nvme, host_memory=least) as offloaded:
        for _ in range(3):
            model(batch).square().mean().backward()
            peak = max(peak, anonymous_bytes())
            offloaded.step()
    print(peak - before - least)
"""


def beyond_budget(directory: Path, **environment: str) -> int:
    """Bytes that a training at the least budget takes beyond that budget."""
    done = subprocess.run(
        [sys.executable, "-c", _TRAIN, str(directory)],
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return int(done.stdout)


@pytest.mark.proof
def test_freed_gradients_are_not_kept_beyond_the_budget(tmp_path: Path) -> None:
    assert beyond_budget(tmp_path) < MARGIN_BYTES


_RUN = """
import sys
import torch
import infinity

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8))
for optimizer in (None, infinity.AdamW()):
    options = {"host_memory": "64MiB", "optimizer": optimizer}
    with infinity.offload(model, sys.argv[1], **options) as offloaded:
        result = model(torch.ones(2, 64)).sum()
        if optimizer is not None:
            result.backward()
            offloaded.step()
assert "torch._dynamo" not in sys.modules
"""


def test_inference_and_training_load_no_compiler(tmp_path: Path) -> None:
    """Some 70 MiB, which torch loads with the first group of an optimizer."""
    command = [sys.executable, "-c", _RUN, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def make() -> nn.Module:
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(16)])


@pytest.mark.parametrize(
    ("budget", "options", "is_held"),
    [
        ("whole", {}, False),
        ("most", {}, True),
        ("least", {}, True),
        ("whole", {"activations": "nvme"}, True),
    ],
)
def test_heap_is_held_small_only_where_memory_is_what_is_short(
    budget: str, options: dict[str, str], is_held: bool, tmp_path: Path
) -> None:
    """Mapping each gradient anew costs page faults, for nothing where there is room."""
    host_memory = budgets(make, tmp_path)[budget]
    with infinity.offload(make(), tmp_path, host_memory=host_memory, **options):  # type: ignore[arg-type]
        assert bool(heap._entered) == is_held
    assert not heap._entered


def test_heap_is_held_small_where_all_that_is_kept_fits_but_not_what_is_freed(
    tmp_path: Path,
) -> None:
    gradients = sum(p.nbytes for p in make().parameters())
    taken = infinity.plan(make(), host_memory=32 << 20).host_bytes
    for room, is_held in ((gradients - 4096, True), (gradients, False)):
        plan = infinity.plan(make(), host_memory=taken + room)
        assert (plan.host_bytes, plan.nvme_bytes) == (taken, 0)
        with infinity.offload(make(), tmp_path, host_memory=taken + room):
            assert bool(heap._entered) == is_held


def test_export_takes_the_memory_that_the_budget_has_for_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def noted(nbytes: int, budget_bytes: int, *kind: Any) -> Slots:
        taken.append(budget_bytes)
        return plan_slots(nbytes, budget_bytes, *kind)

    monkeypatch.setattr("checkpoint.transfer.filling.plan_slots", noted)
    host_memory = budgets(make, tmp_path)["least"]
    with infinity.offload(make(), tmp_path, host_memory=host_memory) as offloaded:
        offloaded.export(tmp_path / "export")
        assert taken == [offloaded._training.checkpoint_bytes]
