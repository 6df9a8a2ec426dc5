"""Host memory of a process that trains a table larger than its budget."""

import subprocess
import sys
from pathlib import Path

import pytest

MARGIN_BYTES = 12 << 20
"""For what is no part of the budget: objects of Python and of torch, stacks, activations."""
TABLE_BYTES = 48 << 20

_TRAIN = """
import gc, sys, tempfile
import torch
import infinity
from swap.tiers import BudgetError

torch.set_num_threads(1)
WIDTH, ROWS, TILE = 256, {table} // 1024, 1 << 20

def anonymous_bytes():
    with open("/proc/self/status") as lines:
        return sum(int(x.split()[1]) for x in lines if x.startswith(("RssAnon", "RssShmem"))) << 10

class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, WIDTH)
        self.middle = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        hidden = self.middle(self.table(tokens))
        hidden.register_hook(lambda _: note())  # the head is done, the table is not
        return self.head(hidden)

peak = 0
def note():
    global peak
    peak = max(peak, anonymous_bytes())

warm = torch.nn.Linear(8, 8)
warm(torch.ones(1, 8)).sum().backward()
torch.optim.AdamW(warm.parameters()).step()
with torch.device("meta"):
    model = Tied()
tokens = torch.arange(4)[None] * 1000
options = dict(max_parameter_bytes=TILE)
with tempfile.TemporaryDirectory(dir=sys.argv[1]) as nvme:
    try:
        with infinity.offload(model, nvme, host_memory=1, **options):
            pass
    except BudgetError as error:
        least = error.least_host_bytes
    gc.collect()
    before = anonymous_bytes()
    with infinity.offload(model, nvme, host_memory=least, **options) as offloaded:
        for _ in range(5):
            model(tokens).square().mean().backward()
            note()
            offloaded.step()
            note()
    print(least, peak - before)
"""


@pytest.mark.proof
def test_table_and_its_gradient_are_never_in_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _TRAIN.format(table=TABLE_BYTES), str(tmp_path)],
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    least, taken = map(int, done.stdout.split())
    assert least < TABLE_BYTES
    assert taken < least + MARGIN_BYTES
    assert taken < TABLE_BYTES
