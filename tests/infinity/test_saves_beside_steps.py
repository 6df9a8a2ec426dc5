"""A save of an offloaded model while another thread takes a step."""

import threading
from pathlib import Path

import pytest
import torch

import infinity
from checkpoint import ChangedTensorError
from tests.support.adamw_model import backward, make_model
from tests.support.early_reads import before_reads


def test_save_beside_a_step_of_another_thread_is_refused_and_the_one_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = make_model(), list[None]()

    def step_beside() -> None:
        calls.append(None)
        if len(calls) == 1:
            stepping = threading.Thread(target=offloaded.step)
            stepping.start()
            stepping.join()

    with infinity.offload(model, tmp_path, optimizer=infinity.AdamW()) as offloaded:
        backward(model, 0)
        offloaded.step()
        offloaded.save(tmp_path / "saved")
        with offloaded.gathered():
            before = next(model.parameters()).detach().clone()
        backward(model, 1)
        before_reads(monkeypatch, step_beside)
        with pytest.raises(ChangedTensorError):
            offloaded.save(tmp_path / "saved")
        offloaded.load(tmp_path / "saved")
        with offloaded.gathered():
            assert torch.equal(next(model.parameters()), before)
