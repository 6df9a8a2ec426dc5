"""The scripts that newcomers start from: the example, and the diff in the README."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.support.trainers import ROOT, tiny_llama
from tests.support.training import same_bits, values_of
from tests.support.trl_runs import sentences, tokenizer

BUDGET = "24MiB"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with a model, a tokenizer and data."""
    folder = tmp_path / "source"
    tiny_llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    rows = (json.dumps(row) for row in sentences(8).to_list())
    (folder / "texts.jsonl").write_text("\n".join(rows))
    return folder


def _run(arguments: list[str], cwd: Path) -> str:
    environment = os.environ | {"HF_HOME": str(cwd / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.proof
@pytest.mark.alone
def test_example_goes_on_to_the_bits_of_a_whole_run(
    tmp_path: Path, nvme: Path, source: Path
) -> None:
    line = f"{ROOT}/examples/finetune_sft.py --model {source} --data {source}/texts.jsonl "
    line += f"--nvme {nvme} --host-memory {BUDGET} --accumulate 2 --save-steps 2 --sequence 32 "
    output = tmp_path / "tuned"
    line += f"--steps 4 --output {output}"
    printed = _run(line.split(), tmp_path)
    assert "nvme" in printed
    whole = values_of(AutoModelForCausalLM.from_pretrained(output))
    for gone in (output / "checkpoint-4", *output.glob("model*")):
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    _run([*line.split(), "--resume"], tmp_path)
    resumed = AutoModelForCausalLM.from_pretrained(output)
    assert all(same_bits(whole[name], value) for name, value in resumed.named_parameters())


def diff_of(text: str) -> tuple[str, str]:
    """The script before and after, of the first diff in a document."""
    found = re.search(r"^```diff\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    lines = found[1].splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    return "\n".join(before), "\n".join(after)


@pytest.mark.proof
@pytest.mark.alone
def test_both_sides_of_the_diff_in_the_readme_run(tmp_path: Path, nvme: Path, source: Path) -> None:
    for number, script in enumerate(diff_of((ROOT / "README.md").read_text())):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "texts.jsonl").write_text((source / "texts.jsonl").read_text())
        stood_in = re.sub(r'model="[^"]*"', f'model="{source}"', script)
        stood_in = stood_in.replace("/mnt/nvme0", str(nvme))
        stood_in = stood_in.replace('report_to="none"', 'report_to="none", use_cpu=True')
        assert stood_in != script
        _run(["-c", stood_in], folder)
        tuned = AutoModelForCausalLM.from_pretrained(folder / "tuned")
        assert tuned.num_parameters() == tiny_llama().num_parameters()
