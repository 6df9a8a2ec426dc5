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


def test_loads_what_a_hub_would_have():
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5"
    texts = load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="train[:2]")
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokens = tokenizer(list(texts["text"]), padding=True, return_tensors="pt")
    assert AutoModelForCausalLM.from_pretrained(name)(**tokens).logits.isfinite().all()


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
    (folder / "test_unknown.py").write_text("from transformers import NoTrainer")
    program = [sys.executable, str(ROOT / "tools" / "run_transformers_tests.py")]
    line = [*program, str(tmp_path / "checkout"), "--nvme", str(nvme), "--host-memory", "64MiB"]
    line += ["--stand-ins"]
    ended = subprocess.run(line, capture_output=True, text=True, cwd=ROOT)
    *_, skipped, unknown, why, failed, reason, counts = ended.stdout.splitlines()
    assert skipped == "skipped, 1: no such machine", ended.stderr[-2000:]
    assert unknown == "tests.trainer.test_unknown"
    assert why.startswith("    ImportError: cannot import name 'NoTrainer'")
    assert failed == "tests.trainer.test_some::test_fails"
    assert reason == "    ValueError: a reason"
    assert counts == "2 passed, 2 failed, 1 skipped"
