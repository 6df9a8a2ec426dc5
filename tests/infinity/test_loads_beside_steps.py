"""Steps that another thread takes as one loads."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.values import loading
from swap.tiered import TieredState
from swap.update.pipeline import UpdatePipeline
from tests.support.adamw_model import backward, make_model
from tests.support.training import least_budget, same_values, values_of


def test_a_step_that_begins_as_a_load_does_is_finished_before_values_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its updates were written over what was loaded, and loaded values over some of them."""
    load, run = loading.load, UpdatePipeline._pass
    model, least = make_model(), least_budget(make_model, tmp_path)
    before = values_of(make_model())
    with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
        offloaded.save(tmp_path / "saved")
        backward(model, 0)

        def run_late(*arguments: Any) -> None:
            time.sleep(0.3)
            run(*arguments)

        def load_late(*arguments: Any, **options: Any) -> Any:
            with ThreadPoolExecutor(1) as other:
                other.submit(offloaded.step).result()
            return load(*arguments, **options)

        monkeypatch.setattr(loading, "load", load_late)
        monkeypatch.setattr(UpdatePipeline, "_pass", run_late)
        offloaded.load(tmp_path / "saved")
        offloaded.flush()
    assert same_values(values_of(model), before)


@pytest.mark.parametrize("restores", [False, True])
def test_a_step_that_waits_for_a_load_is_refused_as_its_gradients_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restores: bool
) -> None:
    """What lay where they had been was taken for them."""
    restore_scalars, take, waits = loading.restore_scalars, TieredState._take, threading.Event()
    model, least = make_model(), least_budget(make_model, tmp_path)
    before = values_of(make_model())
    with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
        offloaded.save(tmp_path / "saved")
        offloaded.snapshot("saved")
        backward(model, 0)
        with ThreadPoolExecutor(1) as other:

            def take_noted(*arguments: Any) -> None:
                waits.set()
                take(*arguments)

            def step_meanwhile(*arguments: Any) -> None:
                steps.append(other.submit(offloaded.step))
                waits.wait(10)
                restore_scalars(*arguments)

            steps: list[Future[None]] = []
            monkeypatch.setattr(TieredState, "_take", take_noted)
            monkeypatch.setattr(loading, "restore_scalars", step_meanwhile)
            if restores:
                offloaded.restore("saved")
            else:
                offloaded.load(tmp_path / "saved")
            with pytest.raises(RuntimeError, match=r"gradient of 0.weight was cleared as step\(\)"):
                steps[0].result()
        offloaded.step()  # of nothing
    assert same_values(values_of(model), before)
