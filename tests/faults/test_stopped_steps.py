"""A step that an I/O error has stopped is finished once, whoever comes to finish it, and when."""

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from aio import AioError
from swap.update.pipeline import UpdatePipeline
from swap.update.stages import Stages
from tests.support.failing_disk import Training, trainings, write_of_component

make = trainings()


def _stopped(make: Callable[..., Training]) -> Training:
    """A training whose second step an I/O error has stopped."""
    training = make(seed=1)
    training.step()
    training.state.flush()
    training.faults.arm("write", errno.EIO, after=2, matches=write_of_component)
    training.step()
    training.state.wait_for_updates()
    return training


@pytest.mark.parametrize(
    ("name", "is_behind"), [("submit", False), ("_begin", False), ("_begin", True)]
)
def test_interrupt_as_a_stopped_step_is_begun_again_has_it_finished_once(
    make: Callable[..., Training], name: str, is_behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the thread has it, or when that has even done it: handlers take their time."""
    training = _stopped(make)
    method = getattr(UpdatePipeline, name)

    def interrupted(pipeline: UpdatePipeline, *arguments: Any) -> None:
        if is_behind:
            method(pipeline, *arguments)
            pipeline.join()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(UpdatePipeline, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.state.flush()
    assert is_behind != bool(training.state.unfinished)
    for parameter in training.state.unfinished:  # others are told what to mend, not of Ctrl-C
        with pytest.raises(AioError, match=r"not finished: mend that, then call offloaded\.flush"):
            training.state.weights.acquire([parameter], "another")
    training.check_all()
    training.step()
    training.check_all()


def test_stopped_step_is_finished_once_where_two_threads_flush(
    make: Callable[..., Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes to begin it, too, when the thread of updates has that of the first."""
    training = _stopped(make)
    submit, turns, is_taken = UpdatePipeline.submit, iter(range(2)), threading.Event()
    is_second = threading.Event()

    def in_turn(pipeline: UpdatePipeline, *arguments: Any) -> None:
        if next(turns) == 0:
            is_second.wait(0.5)
            submit(pipeline, *arguments)
            while pipeline.failure is not None:
                time.sleep(0.001)
            is_taken.set()
        else:
            is_second.set()
            assert is_taken.wait(10)
            submit(pipeline, *arguments)

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr(UpdatePipeline, "submit", in_turn)
        for done in [threads.submit(training.state.flush) for _ in range(2)]:
            done.result()
    training.check_all()


def test_who_waits_for_a_step_does_not_go_on_as_another_thread_begins_it_again(
    make: Callable[..., Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets what stopped the step, or waits for the end: never what is midway."""
    training = _stopped(make)
    may_work, is_under_way = threading.Event(), threading.Event()
    run_kernel = Stages.run_kernel

    def slow_kernel(stages: Stages, job: Any) -> None:
        assert may_work.wait(10)
        run_kernel(stages, job)

    class BegunAgain(UpdatePipeline):
        """Its step is begun by another thread just before it is looked at what has stopped it."""

        @property
        def _failure(self) -> BaseException | None:
            if threading.current_thread() is threading.main_thread() and not again.ident:
                again.start()
                is_under_way.wait(0.5)  # never, if that thread has to wait for this one
            return self.stopped_by

        @_failure.setter
        def _failure(self, failure: BaseException | None) -> None:
            self.stopped_by = failure
            if failure is None:
                is_under_way.set()

    pipeline: Any = training.state.pipeline
    failure = pipeline.__dict__.pop("_failure")
    again = threading.Thread(target=UpdatePipeline.retry, args=(pipeline,))
    with monkeypatch.context() as patch:
        patch.setattr(Stages, "run_kernel", slow_kernel)
        patch.setattr(pipeline, "__class__", BegunAgain)
        pipeline.stopped_by = failure
        try:
            with pytest.raises(AioError):
                pipeline.wait()
        finally:
            may_work.set()
            again.join()
            pipeline.join()
    pipeline._failure = None
    training.check_all()
