"""What ``simulate.py`` prints and writes, of a model that is made up and of measurements."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulate import main
from simulator.homes import homes_of
from simulator.nodes import NODES
from simulator.rates import Rates
from simulator.replay import Pattern, simulate
from simulator.scenario import Scenario, look
from simulator.transformer import Transformer, shape_of
from simulator.validation import predictions, rates_of

from swap.tiers import Budget

MODEL = Transformer(layers=4, hidden=512, tokens=128, micro_batch=2, recomputes=False)
BUDGET = 80 << 20


def _result(seconds: float) -> dict[str, Any]:
    """As ``bench_offload.py`` writes it, with steps of so many seconds."""
    trace = MODEL.trace().as_json()
    for op in trace["ops"]:
        op["seconds"], op["flops"] = op["flops"] / 1e11, 0.0
    plain = {
        "step_seconds": [1.0, 1.0],
        "phase_seconds": {"forward": 0.3, "backward": 0.6, "update": 0.1},
        "trace": trace,
    }
    ours = {"step_seconds": [seconds] * 2, "read_bytes": 100, "written_bytes": 200}
    entry = {
        "bandwidth": {"read": 1e9, "write": 5e8, "both": 1.2e9, "host": 1e10},
        "host": {"adam": 2e9, "gradients": 8e9},
        "samples": {"plain": plain, f"ours:{BUDGET}": ours},
    }
    return {"rounds": [entry], "options": {"steps": 2, "clip": None}}


def test_a_prediction_says_by_how_much_it_is_wrong(tmp_path: Path) -> None:
    (found,) = predictions("once", _result(1.0))
    (right,) = predictions("again", _result(found.predicted.step_seconds))
    assert right.error == pytest.approx(0.0)
    (half,) = predictions("half", _result(2 * found.predicted.step_seconds))
    assert half.error == pytest.approx(-0.5)
    assert half.bound_seconds == 1.0
    rates = rates_of(_result(1.0)["rounds"])
    assert (rates.ssd_write, rates.ssd_together, rates.adam) == (5e8, 1.2e9, 2e9)


def test_a_validation_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(_result(1.0)))
    main(["--validate", str(path), "--json", str(tmp_path / "out.json")])
    assert "bench" in capsys.readouterr().out
    (entry,) = json.loads((tmp_path / "out.json").read_text())
    assert entry["error"] == pytest.approx(entry["predicted"]["step_seconds"] - 1)


def test_a_result_without_a_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = _result(1.0)
    result["rounds"][0]["samples"]["plain"]["trace"] = None
    (tmp_path / "bench.json").write_text(json.dumps(result))
    with pytest.raises(SystemExit):
        main(["--validate", str(tmp_path / "bench.json")])
    assert "no recorded trace" in capsys.readouterr().err


def test_a_model_on_nodes_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--layers",
        "6",
        "--hidden",
        "1024",
        "--ranks",
        "4",
        "--per-node",
        "2",
        "--saves",
        "--ssd-read",
        "1e9",
    ]
    memory = ["--host-memory", "256MiB", "--device-memory", "256MiB"]
    main([*options, *memory, "--json", str(tmp_path / "out.json")])
    assert "step, replayed" in capsys.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["scenario"]["node"]["ssd_read"] == 1e9
    assert 0 < result["efficiency"] <= 1
    assert set(result["formula"]) == {"parameters", "optimizer", "activations"}
    assert result["times_with_saves"]["save_seconds"] > 0


REFUSED = [["--ranks", "6", "--per-node", "4"], ["--host-memory", "x"], ["--writers", "2"]]


@pytest.mark.parametrize("options", REFUSED)
def test_what_cannot_be_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(options)
    assert "error:" in capsys.readouterr().err


def test_shapes_have_about_the_parameters_that_were_asked_for() -> None:
    for wanted in (1e9, 70e9, 530e9, 1e12):
        layers, hidden = shape_of(wanted)
        model = Transformer(layers=layers, hidden=hidden, tokens=1, micro_batch=1)
        assert model.num_parameters == pytest.approx(wanted, rel=0.05)


def test_tiles_cut_matrices_and_change_neither_parameters_nor_arithmetic() -> None:
    whole = Transformer(layers=2, hidden=512, tokens=64, micro_batch=1)
    tiled = Transformer(
        layers=2, hidden=512, tokens=64, micro_batch=1, max_parameter_bytes=512 * 512
    )
    assert tiled.trace().num_parameters == whole.trace().num_parameters == whole.num_parameters
    assert tiled.trace().flops == pytest.approx(whole.trace().flops)
    assert whole.trace().flops == pytest.approx(whole.flops)
    assert max(spec.weight_bytes for spec in tiled.trace().specs) <= 512 * 512


def test_more_nodes_save_faster() -> None:
    model = Transformer(layers=8, hidden=2048, tokens=128, micro_batch=2)
    seconds = [
        look(Scenario(model=model, node=NODES["h100"], world_size=size, per_node=8))
        for size in (8, 16)
    ]
    assert seconds[1].save_alone_seconds == pytest.approx(
        seconds[0].save_alone_seconds / 2, rel=1e-3
    )
    assert seconds[0].checkpoint_bytes == pytest.approx(12 * model.num_parameters, rel=1e-3)
    few = replace(seconds[0].scenario, writers=2, writer_limit=NODES["h100"].ssd_write / 8)
    assert look(few).save_alone_seconds == pytest.approx(4 * seconds[0].save_alone_seconds)


def test_made_up_ops_take_as_long_as_recorded_ones() -> None:
    trace = MODEL.trace()
    homes = homes_of(trace, Budget(host_bytes=BUDGET), on_host=True)
    result = _result(1.0)
    (found,) = predictions("x", result)
    rates = rates_of(result["rounds"])
    times = simulate(trace, homes, _with_flops(rates, trace.flops / 0.9), Pattern(steps=2))
    assert times.read_bytes == pytest.approx(found.predicted.read_bytes, rel=0.2)


def _with_flops(rates: Rates, flops: float) -> Rates:
    return replace(rates, flops=flops)
