"""The ``infinity`` command."""

import sys
from pathlib import Path

import pytest
import torch

import checkpoint
import infinity
from infinity.cli import main
from swap.storage.drives.bandwidth import Bandwidth, kept, shares
from tests.support.models import Stack, vector_loss


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    checkpoint.save({"model": {"w": torch.arange(6.0).view(2, 3)}, "step": 3}, path)
    return path


def test_plan_names_the_budget_and_fails_when_it_is_too_small(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "7e9", "--host-memory", "64GiB"]) == 0
    assert "7,000,000,000" in capsys.readouterr().out
    assert main(["plan", "7e9", "--host-memory", "1MiB"]) == 1


def test_ls_show_and_verify_describe_a_checkpoint(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(saved)]) == 0
    assert capsys.readouterr().out.split() == ["model.w"]
    assert main(["show", str(saved)]) == 0
    assert "float32 2 x 3" in capsys.readouterr().out
    assert main(["verify", str(saved)]) == 0


def test_verify_of_a_damaged_checkpoint_fails_and_names_the_tensor(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = next(saved.rglob("*.safetensors"))
    content = bytearray(data.read_bytes())
    content[4096] ^= 1
    data.write_bytes(content)
    assert main(["verify", str(saved)]) == 1
    assert "model.w" in capsys.readouterr().out


def test_verify_names_its_option_for_stripes_that_were_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stripe, moved = tmp_path / "ssd", tmp_path / "moved"
    stripe.mkdir()
    checkpoint.save({"w": torch.zeros(3)}, tmp_path / "run", [stripe])
    stripe.rename(moved)
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert "--stripe-dir" in capsys.readouterr().out
    assert main(["verify", "--stripe-dir", str(moved), str(tmp_path / "run")]) == 0


def test_export_writes_shards(saved: Path, tmp_path: Path) -> None:
    assert main(["export", str(saved), str(tmp_path / "out")]) == 0
    assert list((tmp_path / "out").glob("*.safetensors"))


def test_missing_path_is_an_error_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(tmp_path / "nothing")]) == 1
    assert "nothing" in capsys.readouterr().err


def test_tune_keeps_a_measurement_that_offload_uses(tmp_path: Path) -> None:
    assert main(["tune", str(tmp_path)]) == 0
    found = kept(tmp_path)
    assert found is not None
    assert min(found.read, found.write) > 0
    assert shares([str(tmp_path)]) == [found.read + found.write]
    model = Stack()
    with infinity.offload(model, tmp_path, host_memory="1GiB") as offloaded:
        vector_loss(model, 0).backward()
        offloaded.step()
    assert kept(tmp_path) == found


def test_unequal_directories_share_the_load_by_their_measurements(tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    for folder, rate in ((fast, 3e9), (slow, 1e9)):
        (folder / ".infinity").mkdir(parents=True)
        (folder / ".infinity" / "bandwidth.json").write_text(f'{{"read": {rate}, "write": {rate}}}')
    assert kept(fast) == Bandwidth(3e9, 3e9)
    assert shares([str(fast), str(slow)]) == [6e9, 2e9]


def test_gc_reports_orphans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gc", str(tmp_path)]) == 0
    assert "0 orphans" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["7e9", "7B", "7b", "7000M", "7_000_000_000", "7000000000", "7G"])
def test_plan_takes_a_number_of_parameters_as_people_write_it(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", text, "--host-memory", "64GiB"]) == 0
    assert "7,000,000,000 on" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["many", "7X", "1e400", "nan", "-3", "0", "0.2", "B", "", "7BB"])
def test_plan_refuses_what_is_no_number_of_parameters_by_name(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--host-memory", "64GiB", "--", text]) == 2
    assert f"{text!r} is not a number of parameters" in capsys.readouterr().err


def test_plan_refuses_more_parameters_than_any_model_has_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "1e30"]) == 1
    assert "pass the model itself" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_plan_refuses_a_world_of_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "7B", f"--world-size={text}"])
    assert f"{text!r} is not a whole number" in capsys.readouterr().err


def test_names_with_brackets_are_printed_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """rich takes what is in brackets for markup, and `:smile:` for a picture."""
    path, names = tmp_path / "[bold]run[/x]", ["a[bold]b", "x[/foo]", "c:smile:"]
    checkpoint.save({name: torch.zeros(3) for name in names}, path)
    for command in ("ls", "show"):
        assert main([command, str(path)]) == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in names), shown
    folder = tmp_path / "out[/x]"
    assert main(["export", str(path), str(folder)]) == 0
    assert str(folder) in capsys.readouterr().out
    assert main(["gc", str(folder)]) == 0
    assert str(folder) in capsys.readouterr().out
    (file,) = path.rglob("*.safetensors")
    with file.open("r+b") as data:
        data.seek(4096)
        data.write(b"damage")
    assert main(["verify", str(path)]) == 1
    assert "a[bold]b" in capsys.readouterr().out


def test_a_closed_stdout_is_no_failure(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it for `infinity ls ... >&-`
    assert main(["ls", str(saved)]) == 0
    assert main(["verify", str(saved)]) == 0


@pytest.mark.parametrize(
    "words", [["tune", ""], ["gc", ""], ["snapshots", ""], ["import", "a", "", "--model", "b"]]
)
def test_an_empty_path_is_refused_and_is_not_the_current_directory(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert "give '.' for the current directory" in capsys.readouterr().err
