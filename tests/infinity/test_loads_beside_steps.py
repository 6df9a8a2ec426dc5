"""Steps that another thread takes as one loads."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.values import loading
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
