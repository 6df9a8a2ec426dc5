"""Host memory beside the budget: what the C library's allocator keeps of freed gradients."""

import subprocess
import sys
from pathlib import Path

import pytest

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
