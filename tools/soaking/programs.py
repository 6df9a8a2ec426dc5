"""What a seed draws: a task, which says what is computed, and lives, which say what happens to it.

Two runs of one task have the same bits, whatever their lives. Pure: no I/O, no tensors.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

LAYERS = ("linear", "linear", "wide", "norm", "conv", "again", "loose", "dropout")
RECOMPUTE = ("no", "no", "reentrant", "non-reentrant")
OPTIMIZERS = ("AdamW", "AdamW", "AdamW bfloat16", "AdamW uint8", "SGD", "Adam", "RMSprop", "own")
ACTIVATIONS = ("keep", "keep", "host", "nvme")
DURABLE = ("nothing", "nothing", "save", "save behind", "snapshot", "snapshot", "both")
KINDS = ("EIO", "ENOSPC", "EINTR", "EAGAIN", "EMFILE", "short", "zero", "torn", "dead", "full")
PLACES = ("step", "step", "durable", "durable", "enter", "resume", "exit")
_MOST_CALLS = {"enter": 300, "resume": 600, "step": 600, "durable": 300, "exit": 300, "kill": 4000}
MOST_LIVES = 6
"""After so many the next is undisturbed, so that each program comes to its end."""


@dataclass(frozen=True, slots=True)
class Layer:
    """`is_skipped`: used in every other pass only, so that some steps have no gradient of it."""

    kind: str
    is_frozen: bool
    is_skipped: bool
    recompute: str


@dataclass(frozen=True, slots=True)
class Step:
    """One step: what is done beside going forward and backward `accumulate` times."""

    accumulate: int
    evaluates: bool
    fails: str
    """In what pass a layer raises: `forward`, `backward`, or none."""
    clips: float | None
    changes_row: int | None
    """Of which layer's first parameter."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained, and how; `dtype` is that of the computation, empty for float32."""

    seed: str
    width: int
    is_tied: bool
    layers: tuple[Layer, ...]
    optimizer: str
    dtype: str
    max_grad_norm: float | None
    max_parameter_bytes: int | None
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """The call `number` that a stage of a life makes fails in the way of `kind`."""

    place: str
    step: int
    kind: str
    number: int


@dataclass(frozen=True, slots=True)
class Block:
    """One offload block. `room`: what part of the way it is from the least budget to all."""

    room: float
    activations: str
    overlap: bool
    verifies: bool
    num_steps: int
    durable: tuple[str, ...]
    looks: tuple[bool, ...]
    keep: int | None
    end: str
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class Life:
    """One process: blocks one after the other, on the same model or on new ones. `kill`: at which
    call of the C library SIGKILL comes, if the life lasts as long.
    """

    blocks: tuple[Block, ...]
    is_same_model: bool
    kill: int | None

    @property
    def is_disturbed(self) -> bool:
        return self.kill is not None or any(block.faults for block in self.blocks)


def task_of(seed: int, number: int) -> Task:
    """The task of program `number`."""
    name = f"{seed}.{number}"
    choose = random.Random(name)
    depth = choose.randint(7, 14)
    layers = tuple(_layer(choose) for _ in range(depth))
    return Task(
        seed=name,
        width=choose.choice((128, 160, 192, 256)),
        is_tied=choose.random() < 0.5,
        layers=(*layers, *(Layer("linear", False, False, "no") for _ in range(3))),
        optimizer=choose.choice(OPTIMIZERS),
        dtype=choose.choice(("", "bfloat16")),
        max_grad_norm=choose.choice((None, 0.3, 1e6)),
        max_parameter_bytes=choose.choice((None, None, None, 262_144)),
        steps=tuple(_step(choose, len(layers)) for _ in range(choose.randint(5, 12))),
    )


def _layer(choose: random.Random) -> Layer:
    return Layer(
        kind=choose.choice(LAYERS),
        is_frozen=choose.random() < 0.2,
        is_skipped=choose.random() < 0.15,
        recompute=choose.choice(RECOMPUTE),
    )


def _step(choose: random.Random, depth: int) -> Step:
    return Step(
        accumulate=choose.choice((1, 1, 2, 3)),
        evaluates=choose.random() < 0.2,
        fails=choose.choice(("", "", "", "", "", "forward", "backward")),
        clips=choose.choice((None, None, None, 0.5)),
        changes_row=choose.randrange(depth) if choose.random() < 0.15 else None,
    )


def life_of(task: Task, number: int) -> Life:
    """Life `number` of a program, from 0 on; those from `MOST_LIVES` on are undisturbed."""
    choose = random.Random(f"{task.seed}, {number}")
    if number >= MOST_LIVES:
        steps = len(task.steps)
        quiet = Block(0.0, "keep", True, False, steps, *_quiet(steps), None, "leave", ())
        return Life((quiet,), is_same_model=False, kill=None)
    how = choose.choice(("kill", "kill", "faults", "faults", "quiet"))
    count = choose.choice((1, 1, 2, 3))
    blocks = tuple(_block(choose, len(task.steps), how == "faults") for _ in range(count))
    kill = _call(choose, "kill") if how == "kill" else None
    return Life(blocks, is_same_model=choose.random() < 0.5, kill=kill)


def _quiet(steps: int) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    return ("nothing",) * steps, (False,) * steps


def _block(choose: random.Random, steps: int, has_faults: bool) -> Block:
    return Block(
        room=choose.choice((0.0, 0.0, choose.random() / 3, choose.random(), 1.0)),
        activations=choose.choice(ACTIVATIONS),
        overlap=choose.random() < 0.8,
        verifies=choose.random() < 0.3,
        num_steps=choose.randint(1, steps),
        durable=tuple(choose.choice(DURABLE) for _ in range(steps)),
        looks=tuple(choose.random() < 0.3 for _ in range(steps)),
        keep=choose.choice((None, 1, 2)),
        end=choose.choice(("leave", "leave", "raise")),
        faults=tuple(_fault(choose, steps) for _ in range(8 if has_faults else 0)),
    )


def _fault(choose: random.Random, steps: int) -> Fault:
    place = choose.choice(PLACES)
    kind = choose.choice(KINDS)
    return Fault(place, choose.randrange(steps), kind, _call(choose, place))


def _call(choose: random.Random, place: str) -> int:
    """Early ones as likely as late ones, whatever is many."""
    return int(math.exp(choose.uniform(0.0, math.log(_MOST_CALLS[place]))))
