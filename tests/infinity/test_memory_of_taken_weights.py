"""What taking values from files and checkpoints leaves in memory, and takes meanwhile."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import checkpoint
import infinity
from checkpoint.loading.opened import OpenCheckpoint
from tests.support.proof import matrix
from tests.support.scripts import Script

LAYERS, WIDTH = 80, 1024
HOST_MEMORY = 32 << 20
"""A tenth of the weights. Resident memory beside it is of mapped files, too."""
_BESIDE_BYTES = 8 << 20
"""Objects of Python, stacks of threads."""
_TAKE = """
import sys
from pathlib import Path
import torch
import infinity

torch.set_num_threads(1)
folder, host_memory, width, is_tied = Path(sys.argv[1]), *map(int, sys.argv[2:5])

def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) << 10

def take(weights, layers):
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
    for number in range(layers if is_tied else 0):
        setattr(model, f"again{number}", model[number])
    options = {"weights": weights, "optimizer": None, "host_memory": host_memory}
    with infinity.offload(model, folder, **options):
        return status("VmHWM")

warm, weights, layers = sys.argv[5], sys.argv[6], int(sys.argv[7])
take(warm, 2)  # what is loaded with the first use is no part of it
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = status("VmRSS")
print(take(weights, layers) - before)
"""


def _saved(folder: Path, kind: str, layers: int) -> Path:
    state = {f"{n}.weight": torch.full((WIDTH, WIDTH), float(n)) for n in range(layers)}
    state |= {f"{n}.bias": torch.ones(WIDTH) for n in range(layers)}
    if kind == "tied":
        state |= {f"again{name}": values.clone() for name, values in state.items()}
    if kind == "checkpoint":
        checkpoint.save(state, folder / str(layers))
        return folder / str(layers)
    save_file(state, folder / f"{layers}.safetensors")
    return folder / f"{layers}.safetensors"


@pytest.mark.parametrize(
    "kind", matrix(["safetensors", "tied", "checkpoint"], usual=["safetensors", "checkpoint"])
)
def test_taking_weights_stays_within_the_budget_in_resident_memory(
    tmp_path: Path, kind: str
) -> None:
    files = [_saved(tmp_path, kind, layers) for layers in (2, LAYERS)]
    options = [HOST_MEMORY, WIDTH, int(kind == "tied")]
    script = Script(_TAKE, tmp_path, *options, *files, LAYERS)
    printed, said = script.end()
    assert script.returncode == 0, said
    assert int(printed) < HOST_MEMORY + _BESIDE_BYTES


_READ = """
import sys
from pathlib import Path
from infinity.values.initial.weight_files import WeightFolder
from tests.support.proof import matrix

def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) << 10

files = WeightFolder(Path(sys.argv[1]))
names = list(files.names)
files.read(names[0]).sum()
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
for name in names:
    files.read(name).sum()
print(status("VmHWM") - before)
"""


def test_reading_one_tensor_after_the_other_keeps_few_pages_of_their_file(tmp_path: Path) -> None:
    script = Script(_READ, _saved(tmp_path, "safetensors", LAYERS))
    printed, said = script.end()
    assert script.returncode == 0, said
    assert int(printed) < 4 * WIDTH * WIDTH * 4 + _BESIDE_BYTES


@pytest.mark.timeout(60)
def test_checkpoint_that_weights_came_from_keeps_nothing_of_them_in_memory(
    nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[OpenCheckpoint] = []
    init = OpenCheckpoint.__init__

    def kept(self: OpenCheckpoint, *arguments: object, **options: object) -> None:
        opened.append(self)
        init(self, *arguments, **options)  # type: ignore[arg-type]

    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    checkpoint.save(model.state_dict(), tmp_path / "weights")
    monkeypatch.setattr(OpenCheckpoint, "__init__", kept)
    with infinity.offload(model, nvme, weights=tmp_path / "weights"):
        assert [one._blocks.held_bytes for one in opened] == [0]
