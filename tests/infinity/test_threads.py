"""Forward and backward passes on other threads than the one that entered the block."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch

import infinity
from tests.support.models import Gpt, Stack, seeded, token_loss, tokens, vector_loss, vectors
from tests.support.proof import matrix
from tests.support.training import WHOLE, least_budget, same_bits, same_values, values_of

T = TypeVar("T")


def _elsewhere(work: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_block_is_left_on_a_thread_that_has_the_number_of_the_ended_one_that_entered(
    nvme: Path,
) -> None:
    model = seeded(Stack)
    before = values_of(model)
    block = infinity.offload(model, nvme)
    entered = _elsewhere(lambda: (block.__enter__(), threading.get_ident())[1])

    def leave(*, anyhow: bool) -> bool:
        is_same = threading.get_ident() == entered
        if is_same or anyhow:
            block.__exit__(None, None, None)
        return is_same or anyhow

    tries = (_elsewhere(partial(leave, anyhow=number == 99)) for number in range(100))
    assert any(tries)
    assert same_values(values_of(model), before)


def _train(model: Gpt, offloaded: infinity.OffloadedModel) -> None:
    for step in range(2):
        token_loss(model, step).backward()
        offloaded.step()


@pytest.mark.parametrize(
    "recompute", matrix(["no", "reentrant", "non-reentrant"], usual=["reentrant"])
)
def test_training_on_another_thread_gives_the_same_bits(recompute: str, nvme: Path) -> None:
    def make() -> Gpt:
        return Gpt(recompute=recompute)  # type: ignore[arg-type]

    results = []
    for host_memory, other in ((WHOLE, False), (WHOLE, True), (least_budget(make, nvme), True)):
        model = seeded(make)
        with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:

            def train(model: Gpt = model, offloaded: infinity.OffloadedModel = offloaded) -> None:
                for step in range(3):
                    token_loss(model, step).backward()
                    offloaded.step()

            _elsewhere(train) if other else train()
        results.append(values_of(model))
    for other_values in results[1:]:
        assert all(same_bits(value, other_values[key]) for key, value in results[0].items())


def test_backward_on_another_thread_than_forward_gives_the_same_bits(nvme: Path) -> None:
    results = []
    for host_memory in (WHOLE, least_budget(Stack, nvme)):
        model = seeded(Stack)
        with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
            for step in range(2):
                loss = _elsewhere(partial(vector_loss, model, step))
                loss.backward()
                offloaded.step()
        results.append(values_of(model))
    assert same_values(results[0], results[1])


@pytest.mark.parametrize("optimizer", [infinity.AdamW(), None])
def test_concurrent_forward_passes_give_what_each_gives_alone(
    optimizer: infinity.AdamW | None, nvme: Path
) -> None:
    model = seeded(Gpt)
    batches = [tokens(number)[:, :-1] for number in range(8)]
    with torch.no_grad():
        expected = [model(batch) for batch in batches]
    start = threading.Barrier(len(batches))

    def run(batch: torch.Tensor) -> list[torch.Tensor]:
        start.wait()
        with torch.no_grad():
            return [model(batch) for _ in range(3)]

    for host_memory in (WHOLE, least_budget(Gpt, nvme, optimizer=optimizer)):
        with (
            infinity.offload(model, nvme, optimizer=optimizer, host_memory=host_memory),
            ThreadPoolExecutor(len(batches)) as pool,
        ):
            for found, value in zip(pool.map(run, batches), expected, strict=True):
                assert all(same_bits(one, value) for one in found)


def test_a_forward_that_fails_on_a_thread_leaves_the_others_alone(nvme: Path) -> None:
    model = seeded(Stack)
    expected = model(vectors(0)).detach()
    with infinity.offload(model, nvme, host_memory=least_budget(Stack, nvme)) as offloaded:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            _elsewhere(lambda: model(torch.ones(2, 7)))
        assert same_bits(model(vectors(0)).detach(), expected)
        vector_loss(model, 0).backward()
        offloaded.step()


def test_a_block_may_end_on_another_thread_than_it_began_on(nvme: Path) -> None:
    model = seeded(Stack)
    before = values_of(model)
    block = infinity.offload(model, nvme, host_memory=least_budget(Stack, nvme))
    _elsewhere(block.__enter__)
    vector_loss(model, 0).backward()
    block.__exit__(None, None, None)
    assert all(same_bits(value, before[key]) for key, value in values_of(model).items())
    model(vectors(0)).sum().backward()


class _Held:
    """A backward pass on a thread of its own, held up after its first gradients."""

    def __init__(self, model: Stack, *, fails: bool = False) -> None:
        self._is_held, self._go_on = threading.Event(), threading.Event()
        self._fails = fails
        self._pool = ThreadPoolExecutor(1, "held")
        outputs: list[torch.Tensor] = []
        hook = model.layers[0].register_forward_hook(lambda *args: outputs.append(args[2]))
        loss = vector_loss(model, 1)
        hook.remove()
        outputs[0].register_hook(self._hold)
        self._future = self._pool.submit(loss.backward)
        assert self._is_held.wait(10)

    def _hold(self, gradient: torch.Tensor) -> None:
        self._is_held.set()
        assert self._go_on.wait(10)
        if self._fails:
            raise ValueError("a hook of the program")

    def end(self) -> None:
        self._go_on.set()
        with self._pool:
            self._future.result()


@pytest.mark.parametrize("scaled", [False, True])
def test_backward_passes_at_once_are_refused_and_no_step_taken(scaled: bool, nvme: Path) -> None:
    results = []
    for overlapping in (False, True):
        model = seeded(Stack)
        with infinity.offload(model, nvme, host_memory=least_budget(Stack, nvme)) as offloaded:
            if overlapping:
                held = _Held(model)
                loss = vector_loss(model, 0)
                with pytest.raises(RuntimeError, match=r"two threads at once, held_0 and MainTh"):
                    (offloaded.backward if scaled else torch.Tensor.backward)(loss)
                held.end()
                if not scaled:  # which brought no gradient
                    with pytest.raises(RuntimeError, match=r"lost .*two threads .*zero_grad\(\)"):
                        offloaded.step()
                offloaded.optimizer.zero_grad()
            vector_loss(model, 0).backward()
            offloaded.step()
        results.append(values_of(model))
    assert same_values(results[0], results[1])


def test_a_backward_pass_that_failed_is_in_nobodys_way(nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=least_budget(Stack, nvme)) as offloaded:
        held = _Held(model, fails=True)
        with pytest.raises(ValueError, match="a hook of the program"):
            held.end()
        vector_loss(model, 0).backward()
        offloaded.step()


@pytest.mark.parametrize("call", ["load", "restore"])
def test_values_are_not_replaced_beside_a_backward_pass_of_another_thread(
    call: str, nvme: Path, tmp_path: Path
) -> None:
    model = seeded(Stack)
    refusals: list[str] = []
    with infinity.offload(model, nvme, host_memory=least_budget(Stack, nvme)) as offloaded:
        offloaded.save(tmp_path / "saved")
        offloaded.snapshot("kept")

        def replace() -> None:
            try:
                offloaded.load(tmp_path / "saved") if call == "load" else offloaded.restore("kept")
            except RuntimeError as error:
                refusals.append(str(error))

        first = next(model.parameters())
        vector_loss(model, 0).backward()
        offloaded.step()
        first.register_hook(lambda gradient: _elsewhere(replace))
        vector_loss(model, 1).backward()
        offloaded.step()
        trained = offloaded.grad_norm
        replace()
        offloaded.drop_snapshot("kept")
    assert len(refusals) == 1, "the pass goes on, and the values are replaced when it has ended"
    assert call in refusals[0]
    assert trained is not None
    assert same_values(values_of(model), values_of(seeded(Stack)))
