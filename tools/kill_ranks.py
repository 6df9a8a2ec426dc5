"""Kills a rank at random moments of training and saving, again and again, and checks what is left.

Ranks train a small GPT on NVMe, bfloat16 weights and clipping, and save after every step, one step
in the foreground, the next in the background. In every attempt all ranks start, go on from the
newest checkpoint, and one of them is killed (SIGKILL) at a random moment: mostly while they train
and save, sometimes while they start. Looked at every time:

- the others end by themselves, within the time that ranks wait for one another and a little more;
- each of them says why with a named error (RankFailedError once they share a model);
- the newest checkpoint is not older than before, and whole: every checksum is compared.

In the end ranks go on undisturbed, and the same steps are trained without any disturbance: weights,
optimizer state, step counts and random states have to be the same, bit for bit, and nothing may be
left in the directories but whole checkpoints.

    python tools/kill_ranks.py --dir DIR --ranks 2 --times 10 --seed 0 [--json out.json]

Ends with 1, and says what, if anything was not as it should be. DIR is left as it was.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT
from local_ranks import Job, Process, be_rank, end, run_ranks, start_ranks

import checkpoint
import infinity

VOCABULARY, TOKENS, BATCH = 256, 32, 2
WIDTH, DEPTH = 256, 8
ENDLESS = 10**6
START_SECONDS = 4.0
"""Within which ranks are killed that are to be killed while they start."""
SLACK_SECONDS = 15.0
"""What a rank may take beyond the time that it waits for others: to find out, clean up and end."""


class WrongError(Exception):
    """Something was not as it should be after a kill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Which rank was killed when, how the others ended, and the newest step after it."""

    killed: int
    after_seconds: float
    while_starting: bool
    ended_seconds: float
    errors: list[str]
    newest: int


def train(job: Job) -> int:
    """One rank: train on from the newest checkpoint to `steps`; gives the step it went on from."""
    given = job.arguments
    group = dist.group.WORLD
    manager = checkpoint.Manager(
        given["root"], keep=2, coordinator=checkpoint.GroupCoordinator(group)
    )
    first = manager.latest() or 0
    torch.manual_seed(0)
    model = GPT(width=WIDTH, depth=DEPTH, vocabulary=VOCABULARY, tokens=TOKENS)
    with infinity.offload(
        model,
        given["nvme"],
        host_memory=least_host_memory(given["nvme"], group),
        compute_dtype=torch.bfloat16,
        optimizer=infinity.AdamW(lr=1e-3),
        max_grad_norm=1.0,
        process_group=group,
    ) as offloaded:
        if first:
            assert offloaded.load(manager.path(first)) == {"step": first}
        assert offloaded.report().planned_bytes["state on nvme"]
        (Path(job.folder) / f"ready-{job.rank}").touch()
        for step in range(first, given["steps"]):
            generator = torch.Generator().manual_seed(step * job.world_size + job.rank)
            rows = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=generator)
            offloaded.backward(model(rows[:, :-1], rows[:, 1:]))
            offloaded.step()
            in_front = step % 2 == 0
            if in_front:
                manager.retire()  # the save before is done when the next one has begun, or here
            extra = {"step": step + 1}
            pending = offloaded.save(manager.path(step + 1), block=in_front, extra=extra)
            if not in_front:
                pending.result()
    return first


def least_host_memory(nvme: str, group: Any) -> int:
    """The least budget that works for a rank, so that as much as possible is on NVMe."""
    model = GPT(width=WIDTH, depth=DEPTH, vocabulary=VOCABULARY, tokens=TOKENS)
    options: dict[str, Any] = {"compute_dtype": torch.bfloat16, "process_group": group}
    try:
        with infinity.offload(model, nvme, host_memory=1, **options):
            raise AssertionError("one byte of host memory was taken for enough")
    except infinity.BudgetError as error:
        return error.least_host_bytes


class Killer:
    """A run of so many ranks under `folder`, and its attempts."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.root = folder / "run"
        self.nvme = folder / "nvme"
        self.nvme.mkdir()
        self._folder = folder
        self._options = options
        self._random = random.Random(options.seed)
        self._arguments: dict[str, Any] = {
            "timeout_seconds": options.timeout,
            "nvme": str(self.nvme),
        }

    def newest(self) -> int:
        """The newest step that is whole; 0 for none."""
        return checkpoint.Manager(self.root).latest() or 0

    def attempt(self, number: int) -> Attempt:
        """Start all, kill one, look. Raises WrongError."""
        before = self.newest()
        meeting = self._folder / f"attempt-{number}"
        meeting.mkdir()
        victim = self._random.randrange(self._options.ranks)
        ranks = start_ranks(
            Path(__file__),
            self._options.ranks,
            meeting,
            output=meeting,
            root=str(self.root),
            steps=ENDLESS,
            **self._arguments,
        )
        try:
            while_starting = self._random.random() < self._options.starting
            if while_starting:
                delay = START_SECONDS * self._random.random()
            else:
                self._wait_until_ready(meeting, ranks)
                delay = self._options.window * self._random.random()
            time.sleep(delay)
            ranks[victim].kill()
            ended = self._wait_for(ranks)
        finally:
            end(ranks)
        errors = [
            self._error_of(meeting / f"rank-{rank}", process, while_starting)
            for rank, process in enumerate(ranks)
            if rank != victim
        ]
        newest = self.newest()
        if newest < before:
            raise WrongError(f"step {before} was saved; after the kill the newest is {newest}")
        if newest and not checkpoint.verify(self.root / f"step-{newest}").ok:
            raise WrongError(f"step {newest} is damaged")
        shutil.rmtree(meeting)
        return Attempt(
            killed=victim,
            after_seconds=delay,
            while_starting=while_starting,
            ended_seconds=ended,
            errors=errors,
            newest=newest,
        )

    def _wait_until_ready(self, meeting: Path, ranks: Sequence[Process]) -> None:
        while len(list(meeting.glob("ready-*"))) < len(ranks):
            for rank, process in enumerate(ranks):
                if process.poll() is not None:
                    told = (meeting / f"rank-{rank}").read_text()
                    raise WrongError(f"rank {rank} ended before it was disturbed:\n{told}")
            time.sleep(0.005)

    def _wait_for(self, ranks: Sequence[Process]) -> float:
        """Seconds until the last one has ended."""
        limit = self._options.timeout + SLACK_SECONDS
        started = time.monotonic()
        while any(process.poll() is None for process in ranks):
            if time.monotonic() - started > limit:
                hanging = [rank for rank, process in enumerate(ranks) if process.poll() is None]
                raise WrongError(f"ranks {hanging} have not ended after {limit} s")
            time.sleep(0.01)
        return time.monotonic() - started

    @staticmethod
    def _error_of(output: Path, process: Process, while_starting: bool) -> str:
        """The last error that a rank told, in a line. Raises WrongError if it has no name."""
        told = output.read_text()
        if process.returncode != 1:
            raise WrongError(f"a rank that was not killed ended with {process.returncode}:\n{told}")
        lines = re.findall(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception): .*)$", told, re.MULTILINE)
        if not lines:
            raise WrongError(f"a rank that was not killed did not say why it ended:\n{told}")
        last = str(lines[-1])
        if not while_starting and not last.startswith("RankFailedError"):
            raise WrongError(f"a rank ended with another error than RankFailedError:\n{told}")
        return last

    def finish(self) -> int:
        """Go on undisturbed, train the same steps without a disturbance, compare. Gives the step.
        Raises WrongError.
        """
        last = self.newest() + 2
        other = self._folder / "undisturbed"
        for root in (self.root, other):
            meeting = self._folder / f"to-{root.name}"
            run_ranks(
                Path(__file__),
                self._options.ranks,
                meeting,
                root=str(root),
                steps=last,
                **self._arguments,
            )
        found, expected = (checkpoint.load(root / f"step-{last}") for root in (self.root, other))
        for loaded in (found, expected):
            del loaded["infinity"]["state"]  # the name of its history, which is another one
        for path, value, reference in pairs("", found, expected):
            if not same(value, reference):
                raise WrongError(f"{path} of step {last} differs from that of undisturbed training")
        self._check_orphans()
        return last

    def _check_orphans(self) -> None:
        left = sorted(self.nvme.glob(".infinity/*"))
        for step in self.root.iterdir():
            manifest = json.loads((step / "manifest.json").read_text())
            beside = {entry.name for entry in step.iterdir()}
            left += [step / name for name in beside - {"manifest.json", manifest["uuid"]}]
            files = {Path(file["path"]).name for file in manifest["files"]}
            there = {entry.name for entry in (step / manifest["uuid"]).iterdir()}
            left += [step / manifest["uuid"] / name for name in there - files]
        if left:
            raise WrongError(f"left behind: {', '.join(map(str, left))}")


def pairs(path: str, tree: Any, other: Any) -> list[tuple[str, Any, Any]]:
    """The leaves of two nestings of dicts and lists, with where they are."""
    if isinstance(tree, dict) and isinstance(other, dict):
        keys = sorted(tree.keys() | other.keys(), key=str)
        return [
            pair for key in keys for pair in pairs(f"{path}.{key}", tree.get(key), other.get(key))
        ]
    if isinstance(tree, list) and isinstance(other, list) and len(tree) == len(other):
        return [
            pair
            for number, two in enumerate(zip(tree, other, strict=True))
            for pair in pairs(f"{path}.{number}", *two)
        ]
    return [(path, tree, other)]


def same(value: Any, other: Any) -> bool:
    """Whether two leaves are equal in kind and bits."""
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        if value.dtype != other.dtype or value.shape != other.shape:
            return False
        mine, theirs = (t.contiguous().reshape(-1).view(torch.uint8) for t in (value, other))
        return torch.equal(mine, theirs)
    return type(value) is type(other) and bool(value == other)


def main(argv: Sequence[str] | None = None) -> int:
    """Kill, look, and say."""
    options = _arguments().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without ending the ranks
    attempts: list[Attempt] = []
    folder = Path(tempfile.mkdtemp(prefix=".kill-ranks-", dir=options.dir))
    try:
        killer = Killer(folder, options)
        for number in range(options.times):
            attempts.append(attempt := killer.attempt(number))
            when = "starting" if attempt.while_starting else "training"
            print(
                f"{number + 1:3}: rank {attempt.killed} of {options.ranks} killed while {when}, "
                f"{attempt.after_seconds:.2f} s in; all ended after {attempt.ended_seconds:.2f} s; "
                f"newest whole step {attempt.newest}",
                flush=True,
            )
        last = killer.finish()
    except WrongError as error:
        print(f"kill_ranks: attempt {len(attempts) + 1}, seed {options.seed}: {error}")
        return 1
    finally:
        shutil.rmtree(folder)
    slowest = max(attempt.ended_seconds for attempt in attempts)
    print(
        f"{options.times} kills of one of {options.ranks} ranks: all ended within {slowest:.1f} s; "
        f"step {last} has the bits of undisturbed training; nothing was left behind"
    )
    if options.json:
        result = {
            "options": {key: value for key, value in vars(options).items() if key != "json"},
            "attempts": [asdict(attempt) for attempt in attempts],
            "last step": last,
        }
        Path(options.json).write_text(json.dumps(result, indent=1))
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--dir", required=True, help="for swap files and checkpoints")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=10, help="kills")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds ranks wait for others")
    parser.add_argument("--window", type=float, default=2.0, help="seconds in which to kill")
    parser.add_argument("--starting", type=float, default=0.2, help="part of kills at the start")
    parser.add_argument("--json", help="write what happened there")
    return parser


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        be_rank(sys.argv[2], train)
    sys.exit(main())
