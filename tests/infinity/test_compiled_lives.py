"""What a program does with a model of compiled blocks beside training it: saving and loading, what
it is after the block, other threads, errors, and what is refused by name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import checkpoint
import infinity
from tests.support.compiled import QUIET, WAYS, Graphs, by_call, by_wrapper
from tests.support.models import Gpt, Stack, seeded, token_loss, vector_loss, vectors
from tests.support.proof import matrix
from tests.support.training import WHOLE, least_budget, same_bits, same_values, values_of

pytestmark = QUIET
UNTRACED = pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def wrapped(graphs: Graphs, **options: Any) -> Gpt:
    model = Gpt(**options)
    by_wrapper(model.blocks, graphs)
    return model


def called(graphs: Graphs, **options: Any) -> Gpt:
    model = Gpt(**options)
    by_call(model.blocks, graphs)
    return model


def step(model: nn.Module, offloaded: infinity.OffloadedModel, number: int) -> float:
    loss = token_loss(model, number)
    loss.backward()
    offloaded.step()
    return loss.item()


def plain(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("_orig_mod.", ""): value for name, value in values.items()}


# What is compiled, when, and what of it is refused.


def test_a_model_that_is_compiled_as_a_whole_is_refused_with_the_remedy(nvme: Path) -> None:
    compiled: Any = torch.compile(Stack(), backend="eager")
    in_place, by_forward = Stack(), Stack()
    in_place.compile(backend="eager")
    vars(by_forward)["forward"] = torch.compile(by_forward.forward, backend="eager")
    for model in (compiled, in_place, by_forward):
        match = r"^a Stack that is compiled as a whole .*for layer in model\.layers: layer\.comp"
        with pytest.raises(ValueError, match=match):
            infinity.offload(model, nvme).__enter__()
        assert not any(hasattr(parameter, "offload_index") for parameter in model.parameters())


@UNTRACED
def test_what_is_compiled_around_an_offloaded_module_is_refused_with_the_remedy(nvme: Path) -> None:
    model = seeded(Stack)
    before = values_of(model)
    compiled = torch.compile(model, backend="eager")
    layer = torch.compile(lambda x: model.layers[0](x) * 2, backend="eager")
    with infinity.offload(model, nvme):
        for call, kind in ((compiled, "Stack"), (layer, "Linear")):
            match = rf"offloaded {kind} was called under torch\.compile.*layer\.compile\(\)"
            with pytest.raises(RuntimeError, match=match):
                call(vectors(0))
        vars(model)["forward"] = torch.compile(model.forward, backend="eager")
        with pytest.raises(RuntimeError, match=r"Stack was compiled as a whole.*layer\.compile"):
            model(vectors(0))
        del model.forward
        vector_loss(model, 0).backward()
    assert same_values(values_of(model), before)


@pytest.mark.parametrize("way", matrix(WAYS, usual=["layer.compile()"]))
def test_blocks_that_are_compiled_inside_the_offload_block_train_to_the_same_bits(
    way: str, nvme: Path
) -> None:
    runs = []
    for late in (False, True):
        torch.compiler.reset()
        graphs = Graphs("aot_eager")
        model = seeded(Gpt)
        if not late:
            WAYS[way](model.blocks, graphs)
        options: dict[str, Any] = {"host_memory": least_budget(Gpt, nvme)}
        with infinity.offload(model, nvme, **options) as offloaded:
            if late:
                WAYS[way](model.blocks, graphs)
            losses = [step(model, offloaded, number) for number in range(3)]
            assert not any("_orig_mod" in name for name, _ in model.named_parameters())
        runs.append((losses, plain(values_of(model)), graphs.count))
    (losses, values, count), (late_losses, late_values, late_count) = runs
    assert losses == late_losses
    assert same_values(values, late_values)
    assert count == late_count == 1


def test_a_late_block_that_the_budget_has_no_room_for_is_refused_by_name(nvme: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(*(Stack() for _ in range(2)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(x)
            return result

    model = seeded(Two)
    with infinity.offload(model, nvme, host_memory=least_budget(Two, nvme)):
        model.inner.compile(backend="eager")
        match = r"^Sequential was compiled inside the offload block .* bytes .* before the block"
        with pytest.raises(RuntimeError, match=match):
            model(vectors(0))
    model = seeded(Two)
    model.inner.compile(backend="eager")
    least = least_budget(lambda: model, nvme)
    with infinity.offload(model, nvme, host_memory=least) as offloaded:
        vector_loss(model, 0).backward()
        offloaded.step()


def test_a_layer_in_a_compiled_block_stays_whole_and_is_named(
    nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = Graphs()
    model = seeded(partial(called, graphs, tied=False, width=160))
    with infinity.offload(model, nvme, max_parameter_bytes=1 << 18):
        token_loss(model, 0).backward()
    warning = next(text for text in caplog.messages if "not tiled" in text)
    assert "blocks.0.up.weight (400.00 KiB, in a compiled block, which computes" in warning


# Saving, loading, and the way out.


@pytest.mark.parametrize("budget", matrix(["whole", "least"], usual=["least"]))
def test_checkpoints_and_exports_have_the_names_of_the_model_that_is_not_compiled(
    budget: str, nvme: Path, tmp_path: Path
) -> None:
    compiled, bare = partial(wrapped, Graphs("aot_eager")), Gpt
    host_memory = WHOLE if budget == "whole" else least_budget(compiled, nvme)
    first = seeded(compiled)
    with infinity.offload(first, nvme, host_memory=host_memory) as offloaded:
        step(first, offloaded, 0)
        offloaded.save(tmp_path / "saved")
        offloaded.export(tmp_path / "exported")
        more = step(first, offloaded, 1)
    names = {name for name, _ in Gpt().named_parameters()}
    assert load_file(tmp_path / "exported" / "model.safetensors").keys() == names
    assert not any("_orig_mod" in name for name in checkpoint.list_tensors(tmp_path / "saved"))
    for make in (bare, compiled):
        torch.compiler.reset()
        model = seeded(make, 1)
        with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
            offloaded.load(tmp_path / "saved")
            assert step(model, offloaded, 1) == pytest.approx(more, rel=1e-5)
        model = seeded(make, 1)
        with infinity.offload(model, nvme, host_memory=WHOLE, weights=tmp_path / "exported"):
            assert token_loss(model, 1).item() == pytest.approx(more, rel=1e-5)
        with torch.device("meta"):
            model = make()
        with infinity.offload(model, nvme, host_memory=host_memory, weights=tmp_path / "exported"):
            assert token_loss(model, 1).item() == pytest.approx(more, rel=1e-5)
        assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("way", matrix(WAYS, usual=["torch.compile(layer)"]))
def test_after_the_block_the_compiled_model_is_as_it_was_with_the_same_graphs(
    way: str, nvme: Path
) -> None:
    graphs = Graphs("aot_eager")
    model = seeded(Gpt)
    WAYS[way](model.blocks, graphs)
    before = [{**vars(module)} for module in model.modules()]
    names = [name for name, _ in model.named_modules()]
    loss = token_loss(model, 0)
    loss.backward()
    model.zero_grad()
    with infinity.offload(model, nvme, host_memory=least_budget(Gpt, nvme)) as offloaded:
        assert step(model, offloaded, 0) == loss.item()
    count = graphs.count  # inside, autocast keeps no casts, which graphs ask for
    assert count == 2
    assert names == [name for name, _ in model.named_modules()]
    for module, known in zip(model.modules(), before, strict=True):
        assert vars(module).keys() == known.keys()
        assert vars(module)["_parameters"] is known["_parameters"]
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert module._compiled_call_impl is known.get("_compiled_call_impl")
    assert token_loss(model, 1).item() != loss.item()
    assert graphs.count == count


# In the block.


def test_values_that_are_gathered_and_changed_are_computed_with(nvme: Path) -> None:
    graphs = Graphs("aot_eager")
    model = seeded(partial(called, graphs))
    with infinity.offload(model, nvme, host_memory=least_budget(Gpt, nvme)) as offloaded:
        first = token_loss(model, 0)
        with offloaded.gathered(modify=True):
            inside = token_loss(model, 0)
            with torch.no_grad():
                model.get_parameter("blocks.0.up.weight").mul_(2)
            changed = token_loss(model, 0)
        after = token_loss(model, 0)
        assert graphs.count == 1
    assert first.item() == inside.item() != changed.item() == after.item()


def test_a_block_that_raises_leaves_nothing_in_place(nvme: Path) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("on purpose")

    model = seeded(partial(called, Graphs()))
    with infinity.offload(model, nvme, host_memory=least_budget(Gpt, nvme)) as offloaded:
        step(model, offloaded, 0)
        handle = model.blocks[2].register_forward_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            token_loss(model, 1)
        handle.remove()
        assert not offloaded._training.residency.held
        assert not any(type(parameter) is nn.Parameter for parameter in model.parameters())
        step(model, offloaded, 1)


class Poked(nn.Module):
    """Does what it is told between two graphs."""

    def __init__(self, poke: Callable[[], None]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.poke = torch.compiler.disable(poke)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.up(x))
        self.poke()
        result: torch.Tensor = self.down(x)
        return result


@pytest.mark.parametrize("way", WAYS)
def test_a_block_that_an_interrupt_ended_leaves_its_gradients_to_the_program(
    way: str, nvme: Path
) -> None:
    """Torch's own hooks do not see an interrupt, which no ``Exception`` is."""
    interrupts: list[None] = []

    def poke() -> None:
        if interrupts:
            interrupts.pop()
            raise KeyboardInterrupt

    blocks = nn.ModuleList([Poked(poke)])
    WAYS[way](blocks, Graphs())
    model = nn.Sequential(blocks[0], nn.Linear(64, 64))
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        model(torch.ones(2, 64)).sum().backward()
        interrupts.append(None)
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(2, 64))
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert not offloaded._training.residency.held
        model.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        model(torch.ones(2, 64)).sum().backward()
        offloaded.step()


class Recurrent(nn.Module):
    """Computes without graphs in a compiled block: no graph is made of an LSTM."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(width, width) for _ in range(2))
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        result: torch.Tensor = self.head(x)
        return result


@pytest.mark.parametrize("way", WAYS)
def test_a_block_that_computes_between_graphs_trains_to_the_same_bits(way: str, nvme: Path) -> None:
    least = least_budget(Recurrent, nvme)
    runs = []
    for compiled in (False, True):
        model = seeded(Recurrent)
        if compiled:
            WAYS[way](model.layers, Graphs())
        with infinity.offload(model, nvme, host_memory=2 * least) as offloaded:
            for number in range(3):
                vector_loss(model, number, width=64).backward()
                offloaded.step()
        runs.append(plain(values_of(model)))
    assert same_values(*runs)


def test_gradients_of_compiled_blocks_are_there_between_backward_and_step(nvme: Path) -> None:
    model, other = seeded(partial(called, Graphs())), seeded(Gpt)
    token_loss(other, 0).backward()
    with infinity.offload(model, nvme, host_memory=least_budget(Gpt, nvme)):
        token_loss(model, 0).backward()
        for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert same_bits(mine.grad.clone(), theirs.grad), name
            assert mine.__class__ is not nn.Parameter


def test_two_threads_compute_with_one_compiled_block_at_once(nvme: Path) -> None:
    model = seeded(partial(called, Graphs()))
    found: list[float] = []
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded, torch.no_grad():
        alone = token_loss(model, 0).item()

        def compute() -> None:
            with torch.no_grad():
                found.extend(token_loss(model, 0).item() for _ in range(10))

        threads = [threading.Thread(target=compute) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert offloaded.report() is not None
    assert found == [alone] * 20


class Mixed(nn.Module):
    """A compiled block that is no element of a list, with a weight that is tied to the outside, and
    one that is frozen.
    """

    def __init__(self, backend: Any = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 256)
        self.block = Head(self.embedding)
        self.block.up.weight.requires_grad_(False)
        if backend is not None:
            self.block.compile(backend=backend)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.block(self.embedding(tokens))
        return logits


class Head(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)
        self.head = nn.Linear(256, 256, bias=False)
        self.head.weight = embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(x + self.down(F.gelu(self.up(x))))
        return logits


@pytest.mark.parametrize("activations", ["keep", "nvme"])
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_tied_and_frozen_weights_of_a_compiled_block_train_to_the_same_bits(
    backend: str, activations: str, nvme: Path
) -> None:
    runs = []
    for compiled in (False, True):
        graphs = Graphs(backend)
        make = partial(Mixed, graphs if compiled else None)
        options: dict[str, Any] = {"activations": activations}
        options["host_memory"] = least_budget(make, nvme, **options)
        model = seeded(make)
        with infinity.offload(model, nvme, **options) as offloaded:
            losses = [step(model, offloaded, number) for number in range(4)]
        runs.append((losses, values_of(model)))
        assert graphs.count == compiled
    assert runs[0][0] == runs[1][0]
    assert same_values(runs[0][1], runs[1][1])
