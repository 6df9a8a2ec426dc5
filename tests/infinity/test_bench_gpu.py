"""``tools/bench_gpu.py`` in small, on a CPU: each piece from end to end, and what it stands on."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_gpu
import bench_overlap
import disk_bandwidth
import host_rates
import pytest
import torch
from gpt import GPT
from gpu_bench import pieces
from gpu_bench.checksums import checksum
from gpu_bench.context import Context, Record
from gpu_bench.copies import rates_of
from gpu_bench.exact_adamw import Options
from gpu_bench.in_memory import ExactUpdate, FusedUpdate
from gpu_bench.rows import HEAD, rows_of
from gpu_bench.sizes import FULL, GIB, SMALL
from gpu_bench.tests import outcomes

import infinity
from tests.support.proof import matrix
from tests.support.training import same_bits, values_of

SMALL_ON_CPU = ["--device=cpu", "--scale=small"]
USUAL = ["rates", "host8k", "nvme", "large", "save", "deepspeed"]
ROWS = {
    "tests": "| tests on the GPU | 0 passed, 0 failed, ",
    "rates": "| link, both, GB/s | ",
    "nvme": "step over max(compute, bytes / disk) | ",
    "large": ": trains, s a step | ",
    "save": "| a durable save of ",
    "deepspeed": "| deepspeed | not run: deepspeed is not installed",
}
pytestmark = pytest.mark.usefixtures("one_thread")


class _LessWork(disk_bandwidth._Work):
    def __init__(self) -> None:
        super().__init__()
        self._left, self._right = self._left[:8, :16], self._right[:16, :16]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that make figures steady, which nobody looks at here."""
    monkeypatch.setattr(disk_bandwidth, "_ALONE_SECONDS", 0.01)
    monkeypatch.setattr(disk_bandwidth, "_Work", _LessWork)
    monkeypatch.setattr(host_rates, "_ELEMENTS", 1 << 16)
    monkeypatch.setattr(bench_overlap, "SETTLING_SECONDS", 0.0)
    monkeypatch.setattr(bench_overlap, "SAVES_ALONE", 3)


def _found(folder: Path, piece: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{piece}.json").read_text())
    return found


@pytest.mark.parametrize("piece", matrix([*bench_gpu.PIECES], usual=USUAL))
def test_piece_runs_to_its_end_and_has_a_row(
    piece: str, nvme: Path, tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    where = [f"--nvme={nvme}", f"--out={out}", f"--piece={piece}", "--in-process"]
    assert bench_gpu.main([*SMALL_ON_CPU, *where]) == 0
    found = _found(out, piece)
    assert found["complete"]
    printed = capsys.readouterr().out
    assert printed == (out / "rows.md").read_text()
    assert ROWS.get(piece, "over all in device memory | ") in printed
    if "bits" in found:
        assert found["bits"]["same_losses"]
        assert found["bits"]["different_parameters"] == 0
        assert len(found["rounds"]) == SMALL.rounds
    if piece == "nvme":
        assert found["bytes_by_tier"]["nvme"] > 0
        assert all(entry["samples"]["offloaded"]["read_bytes"] for entry in found["rounds"])
    elif piece.startswith("host"):
        assert found["bytes_by_tier"]["nvme"] == 0


@pytest.mark.proof
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_all_pieces_run_in_processes_of_their_own(nvme: Path, tmp_path: Path) -> None:
    where = [f"--nvme={nvme}", f"--out={tmp_path / 'out'}"]
    assert bench_gpu.main([*SMALL_ON_CPU, *where]) == 0
    for piece in bench_gpu.PIECES:
        assert _found(tmp_path / "out", piece)["complete"], piece
    bits = _found(tmp_path / "out", "host32k")["bits"]
    assert bits["losses"]["memory"] == bits["losses"]["offloaded"]


def test_piece_that_fails_says_why_and_keeps_what_it_found(
    nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object, record: Record) -> None:
        record.note(passed=3, failed={}, skipped={})
        raise ValueError("out of luck")

    monkeypatch.setitem(bench_gpu.PIECES, "tests", bench_gpu.Piece(run=fail, seconds=1))
    where = [f"--nvme={nvme}", f"--out={tmp_path / 'out'}", "--piece=tests"]
    assert bench_gpu.main([*SMALL_ON_CPU, *where]) == 1
    table = capsys.readouterr().out
    assert "| tests on the GPU | 3 passed, 0 failed, 0 skipped | 0 failed |" in table
    assert "| tests | not complete: ValueError: out of luck |  |" in table


def test_disk_is_measured_by_fio_where_there_is_one(
    nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = {"io_bytes": 6_000_000, "runtime": 3}
    program = tmp_path / "fio"
    program.write_text(f"#!/bin/sh\necho '{json.dumps({'jobs': [{'read': moved}]})}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    context = Context(scale=SMALL, device="cpu", nvme=[str(nvme)], deadline=0.0)
    assert pieces._by_fio(context, "read") == 2e9


def test_piece_that_takes_too_long_is_ended() -> None:
    assert bench_gpu._status_within(["tail", "-f", "/dev/null"], 0.1) < 0
    assert bench_gpu._status_within([sys.executable, "-S", "-c", "raise SystemExit(3)"], 60) == 3


def test_piece_that_was_cut_off_has_the_rows_of_what_it_did(tmp_path: Path) -> None:
    Record(tmp_path / "rates.json", "rates").note(host={"adam": 4e9})
    assert rows_of(tmp_path) == (
        f"{HEAD}| AdamW on the CPU, G parameters/s | 4.00 |  |\n"
        "| rates | not complete: cut off |  |\n"
    )


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def model(request: pytest.FixtureRequest) -> GPT:
    torch.manual_seed(0)
    shape = {"width": 128, "depth": 2, "vocabulary": 256, "tokens": 32}
    return GPT(**shape, recompute_rows=16).to(request.param)


def _losses(model: GPT, steps: int = 5) -> Iterator[torch.Tensor]:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(0, 256, (2, 33), generator=generator)
        yield model(batch[:, :-1], batch[:, 1:])


@pytest.mark.parametrize("clip", matrix([None, 0.5], usual=[0.5]))
def test_exact_update_has_the_bits_of_offloaded_training(
    model: GPT, clip: float | None, nvme: Path
) -> None:
    dtype = next(model.parameters()).dtype
    first = {name: value.clone() for name, value in model.state_dict().items()}
    ours = []
    with infinity.offload(
        model,
        nvme,
        optimizer=infinity.AdamW(lr=1e-2),
        compute_dtype=dtype,
        host_memory="64MiB",
        max_grad_norm=clip,
    ) as offloaded:
        for loss in _losses(model):
            offloaded.backward(loss)
            offloaded.step()
            ours.append((loss.item(), offloaded.grad_norm.item()))
    after = values_of(model)
    model.load_state_dict(first)
    update = ExactUpdate(list(model.parameters()), Options(lr=1e-2), clip)
    scale = 2.0**16 if dtype == torch.float16 else 1.0
    plain = []
    for loss in _losses(model):
        (loss * scale).backward()
        plain.append((loss.item(), update(scale).item()))
    assert plain == ours
    assert all(same_bits(value, after[name]) for name, value in values_of(model).items())


def test_fused_update_trains_as_the_exact_one(model: GPT) -> None:
    first = {name: value.clone() for name, value in model.state_dict().items()}
    found = []
    for make in (ExactUpdate, FusedUpdate):
        model.load_state_dict(first)
        update = make(list(model.parameters()), Options(lr=1e-2), 0.5)
        losses = []
        for loss in _losses(model):
            (loss * 8).backward()
            losses.append((loss.item(), update(8.0).item()))
        found.append(torch.tensor(losses))
    torch.testing.assert_close(*found, rtol=0.02, atol=0.0)


def test_recomputed_loss_is_that_of_whole_logits() -> None:
    torch.manual_seed(0)
    shape = {"width": 64, "depth": 2, "vocabulary": 128, "tokens": 24}
    plain, recomputed = GPT(**shape), GPT(**shape, recompute_rows=16)
    recomputed.load_state_dict(plain.state_dict())
    batch = torch.randint(0, 128, (2, 25))
    losses = [one(batch[:, :-1], batch[:, 1:]) for one in (plain, recomputed)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(
    ("device_bytes", "billions"), [(80 * GIB, (2.5, 4.0)), (139 * GIB, (5.5, 7.5))]
)
def test_model_is_the_largest_that_fits_the_card(
    device_bytes: int, billions: tuple[float, float]
) -> None:
    depth = FULL.depth_within(device_bytes, 128 * GIB)
    parameters = FULL.parameters(depth) / 1e9
    assert billions[0] < parameters < billions[1]
    beside = FULL.device_memory + FULL.activation_bytes(depth, FULL.largest_batch)
    assert 16e9 * parameters + beside < device_bytes


def test_model_is_as_large_as_the_host_has_memory_for() -> None:
    depth = FULL.depth_within(139 * GIB, 64 * GIB)
    assert 14 * FULL.parameters(depth) < 56 * GIB
    assert depth < FULL.depth_within(139 * GIB, 128 * GIB)
    with pytest.raises(ValueError, match="no model of width 4096 fits"):
        FULL.depth_within(8 * GIB, 128 * GIB)


def test_number_of_parameters_is_that_of_the_model() -> None:
    with torch.device("meta"):
        model = GPT(width=128, depth=3, vocabulary=256, tokens=32)
    assert SMALL.parameters(3) == sum(p.numel() for p in model.parameters())


def _copy(name: str, start: float, seconds: float, nbytes: int) -> dict[str, Any]:
    args = {"bytes": nbytes}
    return {"cat": "gpu_memcpy", "name": name, "ts": start, "dur": seconds, "args": args}


def test_rates_of_copies_go_by_the_time_in_which_one_was_under_way() -> None:
    up, down = "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pageable)"
    found = rates_of(
        [
            _copy(up, 0.0, 100.0, 5_000_000),
            _copy(up, 50.0, 100.0, 5_000_000),
            _copy(up, 400.0, 50.0, 4_000_000),
            _copy(up, 500.0, 900.0, 4),  # too small to count
            _copy(down, 0.0, 1000.0, 2_000_000),
            {"cat": "kernel", "name": "gemm", "ts": 0, "dur": 9},
        ]
    )
    assert found["up"] == {
        "bytes": 14_000_000,
        "seconds": pytest.approx(200e-6),
        "rate": pytest.approx(7e10),
        "pageable": 0,
    }
    assert found["down"]["pageable"] == 2_000_000


def test_checksum_tells_values_and_places() -> None:
    values = torch.arange(6, dtype=torch.bfloat16)
    assert checksum(values) == checksum(values.clone().view(2, 3))
    assert checksum(values) != checksum(values.flip(0))
    assert checksum(values) != checksum(values + 1)


def test_outcomes_of_tests_have_failures_by_name() -> None:
    report = """<testsuites><testsuite>
        <testcase classname="tests.gpu.a" name="one"/>
        <testcase classname="tests.gpu.a" name="two"><failure message="assert 1 == 2"/></testcase>
        <testcase classname="tests.gpu.a" name="three"><skipped message="no NCCL"/></testcase>
    </testsuite></testsuites>"""
    assert outcomes(report) == {
        "passed": 1,
        "failed": {"tests.gpu.a::two": "assert 1 == 2"},
        "skipped": {"no NCCL": 1},
    }
