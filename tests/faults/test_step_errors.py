"""A step that an error kept from being taken is taken by the next call as it would have been."""

import errno
from pathlib import Path
from unittest.mock import patch

import pytest

import infinity
from aio import AioError
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import WHOLE, same_values, values_of


def test_clipping_asked_for_a_step_that_raised_is_done_by_the_next(tmp_path: Path) -> None:
    results = []
    for fails in (False, True):
        model = seeded(Stack)
        with infinity.offload(model, tmp_path, host_memory=WHOLE) as offloaded:
            vector_loss(model, 0).backward()
            offloaded.clip_grad_norm_(1e-9)
            failure = AioError("the step before failed", errno=errno.EIO)
            if fails:
                with (
                    patch.object(offloaded._training.state, "step", side_effect=failure),
                    pytest.raises(AioError),
                ):
                    offloaded.step()
            offloaded.step()
        results.append(values_of(model))
    assert same_values(results[0], results[1])
