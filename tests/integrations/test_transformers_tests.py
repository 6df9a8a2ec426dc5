"""The program that runs transformers' own tests, on a checkout of three tests that is made here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.trainers import ROOT

TESTS = """
import pytest
import torch
from transformers import Trainer, TrainingArguments


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.ones(()))

    def forward(self, x, labels=None):
        return ((x * self.slope - labels) ** 2).mean(), x


def test_trains(tmp_path):
    rows = [{"x": torch.tensor(float(i)), "labels": torch.tensor(2.0 * i)} for i in range(4)]
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, report_to="none")
    trainer = Trainer(Line(), args, train_dataset=rows)
    trainer.train()
    assert trainer.offloaded.report()


def test_fails():
    raise ValueError("a reason")


@pytest.mark.skip(reason="no such machine")
def test_skips():
    pass
"""


def test_tests_of_a_checkout_run_with_an_offloading_trainer(tmp_path: Path, nvme: Path) -> None:
    folder = tmp_path / "checkout" / "tests" / "trainer"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(TESTS)
    program = [sys.executable, str(ROOT / "tools" / "run_transformers_tests.py")]
    line = [*program, str(tmp_path / "checkout"), "--nvme", str(nvme), "--host-memory", "64MiB"]
    ended = subprocess.run(line, capture_output=True, text=True, cwd=ROOT)
    last = ended.stdout.splitlines()[-3:]
    assert last == [
        "tests.trainer.test_some::test_fails",
        "    ValueError: a reason",
        "1 passed, 1 failed, 1 skipped",
    ], ended.stderr[-2000:]
