"""The benchmark of long sequences, in small: what it runs, writes down and prints."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench_sequences import MODES, main, rounds_of

SIZE = ["--width=64", "--depth=2", "--vocabulary=64", "--budget=16MiB"]


@pytest.mark.proof
def test_modes_take_the_same_steps_of_each_length(
    nvme: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "result.json"
    main([f"--nvme={nvme}", f"--json={result}", "--rounds=2", "--tokens", "1024", "4096", *SIZE])
    found: dict[str, Any] = json.loads(result.read_text())
    assert found["rounds"].keys() == {"1024", "4096"}
    for rounds in found["rounds"].values():
        assert len(rounds) == 2
        for entry in rounds:
            assert entry.keys() == {*MODES}
            assert len({one["loss"] for one in entry.values()}) == 1
            assert all(one["peak_bytes"] > 0 for one in entry.values())
    printed = capsys.readouterr().out
    assert all(mode in printed for mode in MODES)
    assert not list(nvme.iterdir())


class _Losing:
    """A mode whose loss is its own."""

    def __init__(self, mode: str, loss: float) -> None:
        self.mode = mode
        self._loss = loss

    def step(self, tokens: int) -> dict[str, Any]:
        return {"loss": self._loss, "tokens": tokens}


def test_modes_that_give_other_losses_are_refused() -> None:
    systems: list[Any] = [_Losing("keep", 1.0), _Losing("nvme", 1.5)]
    with pytest.raises(RuntimeError, match=r"different losses.*1\.5"):
        rounds_of(systems, 8, 1)


def test_a_first_step_of_a_length_is_not_counted() -> None:
    systems: list[Any] = [_Losing("keep", 1.0), _Losing("nvme", 1.0)]
    assert len(rounds_of(systems, 8, 3)) == 3
