"""The benchmark of the kernels runs, and says of every row what it measured."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).parents[2] / "tools" / "bench_adam.py"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("bench_adam", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_bench_prints_every_row_with_its_spread_and_peers_as_json(
    bench: ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench.main(["--quick", "--json", "--no-deepspeed", "--threads", "2"])
    report = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in report["rows"]}
    assert rows.keys() == {
        "ours fp32",
        "ours halves",
        "ours bf16 copy",
        "ours fp16 copy",
        "ours halves, aside",
        "ours halves, copied before",
        "ours halves, bf16 moments",
        "ours halves, 8-bit moments",
        "torch fp32",
        "torch fp32, bf16 in and out",
        "torch fp32, fp16 in and out",
        "torch all bf16",
    }
    assert report["threads"] == 2
    for row in rows.values():
        assert 0 < row["seconds"]["q1"] <= row["seconds"]["median"] <= row["seconds"]["q3"]
        assert row["parameters_per_second"] == report["elements"] / row["seconds"]["median"]
    assert rows["ours halves"]["speedup_over"].keys() == {
        "torch fp32, bf16 in and out",
        "torch all bf16",
    }
    assert rows["torch fp32"]["speedup_over"] == {}


def test_bench_prints_a_table_with_a_line_for_each_row_and_ratio(
    bench: ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench.main(["--quick", "--rounds", "1", "--no-deepspeed"])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("ours halves  ") for line in lines) == 3
    assert any(" x as fast as torch all bf16" in line for line in lines)


def test_spread_of_values_gives_median_and_quartiles(bench: ModuleType) -> None:
    assert bench.spread([4.0, 1.0, 3.0, 2.0, 5.0]) == {"q1": 2.0, "median": 3.0, "q3": 4.0}
    assert bench.spread([7.0]) == {"q1": 7.0, "median": 7.0, "q3": 7.0}
