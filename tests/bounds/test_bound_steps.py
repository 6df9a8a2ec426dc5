"""What ``bound_steps.py`` prints and writes, of a model that is made up and of measurements."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bound_steps import main
from bounds.nodes import NODES
from bounds.scenario import Scenario, look
from bounds.transformer import Transformer, shape_of
from bounds.validation import comparisons

import infinity

GIB = 1 << 30
MODEL = Transformer(layers=8, hidden=2048, tokens=128, micro_batch=2)
SCENARIO = Scenario(model=MODEL, node=NODES["h100"], world_size=8, per_node=8)
SMALL = replace(SCENARIO.node, host_memory=GIB, device_memory=GIB)
ON_NVME = replace(SCENARIO, node=SMALL, world_size=1, per_node=1)


def _result(**rates: float) -> dict[str, Any]:
    """As ``bench_offload.py`` writes it, of a step of 0.9 s of passes in memory."""
    plain = {
        "step_seconds": [1.0, 1.0],
        "phase_seconds": {"forward": 0.3, "backward": 0.6, "update": 0.1},
    }
    ours = {"step_seconds": [2.0, 2.0], "read_bytes": 100, "written_bytes": 200}
    bandwidth = {"read": 1e9, "write": 1e9, "both": 2e9, "host": float("inf")} | rates
    entry = {
        "bandwidth": bandwidth,
        "host": {"adam": 1e12, "gradients": 1e12},
        "samples": {"plain": plain, "ours:64MiB": ours},
    }
    model = {"width": 512, "depth": 4, "vocabulary": 512, "tokens": 64, "dtype": "bfloat16"}
    return {"rounds": [entry], "options": {"device": "cpu", **model}}


def test_a_measured_step_stands_beside_what_is_planned_for_it() -> None:
    (fast,) = comparisons("fast", _result(read=1e15, write=1e15, both=1e15))
    assert fast.step.least_seconds == pytest.approx(0.9, rel=1e-3)
    assert fast.step.limit == "the host's cores"
    assert fast.error == pytest.approx(-0.55, rel=1e-3)
    (slow,) = comparisons("slow", _result(both=1e7))
    moved = slow.planned_read_bytes + slow.planned_written_bytes
    assert moved > 0
    assert slow.step.least_seconds == pytest.approx(moved / 1e7)


def test_bytes_that_pass_the_cores_take_from_computing() -> None:
    (free,) = comparisons("free", _result())
    (busy,) = comparisons("busy", _result(host=1e9))
    moved = busy.planned_read_bytes + busy.planned_written_bytes
    cores = [found.step.seconds["the host's cores"] for found in (free, busy)]
    assert cores[1] - cores[0] == pytest.approx(moved / 1e9)


def test_a_comparison_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(_result()))
    main(["--compare", str(path), "--json", str(tmp_path / "out.json")])
    assert "bench" in capsys.readouterr().out
    (entry,) = json.loads((tmp_path / "out.json").read_text())
    assert (entry["measured_seconds"], entry["measured_read_bytes"]) == (2.0, 100.0)


def test_a_result_of_a_gpu_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = _result()
    result["options"]["device"] = "cuda"
    (tmp_path / "bench.json").write_text(json.dumps(result))
    with pytest.raises(SystemExit):
        main(["--compare", str(tmp_path / "bench.json")])
    assert "no rates of a host" in capsys.readouterr().err


def test_a_model_on_nodes_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--layers 6 --hidden 1024 --ranks 4 --per-node 2 --ssd-read 1e9"
    memory = "--host-memory 512MiB --device-memory 256MiB"
    main([*options.split(), *memory.split(), "--json", str(tmp_path / "out.json")])
    assert "if all of it overlaps" in capsys.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["scenario"]["node"]["ssd_read"] == 1e9
    assert 0 < result["efficiency"] <= 1
    assert set(result["formula"]) == {"parameters", "optimizer", "activations"}
    assert result["least_seconds"] < result["most_seconds"]


REFUSED = [
    "--ranks 6 --per-node 4",
    "--host-memory x",
    "--host-memory 1MiB --device-memory 1MiB",
    "--writers 2",
    "--flops 0",
]


@pytest.mark.parametrize("options", REFUSED)
def test_what_cannot_be_is_refused(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--layers", "2", "--hidden", "1024", *options.split()])
    assert "error:" in capsys.readouterr().err


def test_shapes_have_about_the_parameters_that_were_asked_for() -> None:
    for wanted in (1e9, 70e9, 530e9, 1e12):
        layers, hidden = shape_of(wanted)
        model = Transformer(layers=layers, hidden=hidden, tokens=1, micro_batch=1)
        assert model.num_parameters == pytest.approx(wanted, rel=0.05)
    assert sum(p.numel() for p in MODEL.module().parameters()) == MODEL.num_parameters


def _planned(activations: str) -> infinity.Plan:
    return infinity.plan(
        MODEL.module(),
        host_memory=GIB,
        device_memory=GIB,
        device="cuda",
        compute_dtype=torch.bfloat16,
        activations=activations,
    )


def test_bytes_are_those_that_infinity_plans() -> None:
    found = look(ON_NVME)
    plan = _planned("host")
    assert found.read_bytes == plan.read_bytes_per_step > 0
    assert found.step.seconds["reads"] == plan.read_bytes_per_step / SMALL.ssd_read
    assert found.nvme_share > 0.5


def test_a_slow_part_makes_the_step_as_long_as_it_works() -> None:
    for name in ("flops", "ssd_write", "adam", "to_device", "network"):
        slow = replace(SMALL, **{name: getattr(SMALL, name) / 1e6})
        found = look(replace(ON_NVME, node=slow, world_size=2, per_node=2)).step
        assert found.least_seconds == found.seconds[found.limit]
        assert found.most_seconds < 1.01 * found.least_seconds


def test_activations_take_the_link_and_the_disk() -> None:
    found = {
        where: look(replace(ON_NVME, activations=where)) for where in ("device", "host", "nvme")
    }
    up = {where: found[where].step.seconds["to the device"] for where in found}
    assert up["host"] - up["device"] == pytest.approx(MODEL.activation_bytes / SMALL.to_device)
    plan = _planned("nvme")
    written = found["nvme"].written_bytes
    assert written == plan.written_bytes_per_step + MODEL.activation_bytes


def test_more_nodes_save_faster() -> None:
    one, two = (look(replace(SCENARIO, world_size=size)) for size in (8, 16))
    assert two.save_alone_seconds == pytest.approx(one.save_alone_seconds / 2, rel=1e-3)
    assert one.checkpoint_bytes == pytest.approx(12 * MODEL.num_parameters, rel=1e-3)
    few = replace(SCENARIO, writers=2, writer_limit=SCENARIO.node.ssd_write / 8)
    assert look(few).save_alone_seconds == pytest.approx(4 * one.save_alone_seconds)
    assert one.with_saves.seconds["writes"] == pytest.approx(one.save_alone_seconds, rel=1e-3)
