"""Whatever a program does inside the block, it gives the same bits or the same error under every
budget; and without an error, the bits of plain PyTorch.

Programs are drawn as lists of operations on a model with tied, frozen, complex, parametrized,
checkpointed and buffered parts, see ``tests.support.programs``. What is refused changes nothing:
the program goes on. A change of weights where there may be none ends it, and names a parameter.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import infinity
from tests.support import programs
from tests.support.models import seeded
from tests.support.program_models import DEPTH, Mixed
from tests.support.programs import Program, errors_in, offloaded_outcome, plain_outcome
from tests.support.training import WHOLE, least_budget

NAMES = (
    *("embedding.weight", "layers.0.weight", "layers.1.weight", "layers.4.weight"),
    *("layers.9.weight", "rotation", "norm.weight"),
    "layers.7.parametrizations.weight.original1",
)
PUT_IN = ("layers.18", "scale", "layers.2.parametrizations", "head.weight")
_make = partial(seeded, Mixed)
_numbers = st.integers(0, 3)
_layers = st.integers(0, DEPTH - 1)
_names = st.sampled_from(NAMES)


def _op(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(st.just(name), *arguments)


def _one(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


_TRAINING = st.one_of(
    _op("backward", _numbers),
    _op("step"),
    _op("evaluate", _numbers, _one("train", "no_grad", "inference")),
)
_PASSES = st.one_of(
    _op("keep_loss", _numbers),
    _op("keep_autocast_loss", _numbers),
    _op("backward_of_kept"),
    _op("backward_of_all"),
    _op("backward_retained", _numbers),
    _op("differentiate", _numbers),
    _op("penalty", _names),
    _op("fail", _layers, _one("forward", "before", "backward")),
)
_VALUES = st.one_of(
    _op("zero", _one("model", "optimizer", "each")),
    _op("only_step"),
    _op("set_option", _one("lr", "weight_decay"), _one(0.0, 1e-3, 0.1)),
    _op("gradient", _names),
    _op("assign_gradient", _names),
    _op("train_part", _names, st.booleans()),
    _op("keep", _names, _one(*programs.TAKES)),
    _op("look_at_kept"),
    _op("gathered", _names, _one("modify", "scratch", "all")),
    _op("save", st.booleans()),
    _op("load"),
    _op("export"),
    _op("change_buffer"),
    _op("add_buffer", _layers, st.booleans()),
    _op("hook", _layers, _one(*programs.HOOKS)),
    _op("unhook"),
)
_INNER = st.one_of(_TRAINING, _PASSES, _op("save", st.just(True)), _op("load"))
_WRONG = st.one_of(
    _op("edit", _names, _one(*programs.EDITS)),
    _op("replace", _one(*programs.PUTS)),
    _op("misuse", _one(*programs.MISUSES)),
    _op("add_group"),
    _op("backward_twice", _numbers),
    _op("gathered_with", _names, _INNER),
)
PROGRAMS = st.lists(st.one_of(_TRAINING, _TRAINING, _PASSES, _VALUES, _VALUES, _WRONG), max_size=12)
UNLIKE_PLAIN = {"keep", "export"}
"""What is kept is a copy here; export is ours alone."""


@cache
def _least(optimizer: Any, nvme: Path) -> int:
    return least_budget(Mixed, nvme, optimizer=optimizer)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", [infinity.AdamW(lr=1e-2), None], ids=["trained", "inference"])
def test_any_program_is_the_same_under_every_budget(
    optimizer: infinity.AdamW | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    nvme = tmp_path_factory.mktemp("nvme")
    least = _least(optimizer, nvme)

    @settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
    @given(PROGRAMS)
    def check(program: Program) -> None:
        outcomes: list[tuple[Any, ...]] = []
        for host_memory in (WHOLE, least):
            folder = tmp_path_factory.mktemp("program") / "nvme"
            folder.mkdir()
            outcomes.append(
                offloaded_outcome(program, folder, host_memory, _make, optimizer=optimizer)
            )
            assert not any(folder.iterdir())
        assert outcomes[0] == outcomes[1]
        last = outcomes[0][-1]
        if last.startswith("ended: "):
            assert any(name in last for name in (*NAMES, *PUT_IN)), last
        is_alike = optimizer is not None and UNLIKE_PLAIN.isdisjoint(name for name, *_ in program)
        if is_alike and not errors_in(outcomes[0]):
            assert plain_outcome(program, tmp_path_factory.mktemp("plain"), _make) == outcomes[0]

    check()


HAPPY: dict[str, Program] = {
    "passes": [
        ("keep_loss", 0),
        ("evaluate", 1, "no_grad"),
        ("keep_autocast_loss", 2),
        ("backward_of_all",),
        ("backward_retained", 1),
        ("penalty", "layers.1.weight"),
        ("backward_of_kept",),
        ("step",),
        ("differentiate", 1),
        ("backward", 0),
        ("only_step",),
        ("zero", "each"),
    ],
    "values": [
        ("backward", 0),
        ("step",),
        ("save", False),
        ("train_part", "layers.1.weight", False),
        ("backward", 1),
        ("step",),
        ("train_part", "layers.1.weight", True),
        ("gathered", "rotation", "modify"),
        ("load",),
        ("set_option", "lr", 0.1),
        ("assign_gradient", "layers.4.weight"),
        ("change_buffer",),
        ("step",),
    ],
    "hooks": [
        ("hook", 1, "forward"),
        ("hook", 4, "before"),
        ("hook", 9, "backward"),
        ("hook", 2, "tensor"),
        ("hook", 5, "post"),
        ("add_buffer", 3, True),
        ("backward", 0),
        ("step",),
        ("unhook",),
        ("backward", 1),
        ("step",),
    ],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HAPPY)
def test_a_program_gives_the_bits_of_plain_torch_under_the_least_budget(
    name: str, nvme: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    optimizer = infinity.AdamW(lr=1e-2)
    least = _least(optimizer, nvme)
    found = offloaded_outcome(HAPPY[name], nvme, least, _make, optimizer=optimizer)
    assert not errors_in(found)
    (tmp_path / "plain").mkdir()
    assert found == plain_outcome(HAPPY[name], tmp_path / "plain", _make)
