"""Ranks that do not come, do something else, or have no room: a named error on every rank."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import pytest

import infinity
from checkpoint.saving import running
from infinity.ranks.zero3 import Zero3
from tests.support import rank_attacks
from tests.support.models import vector_loss
from tests.support.rank_jobs import complaint, stack, world
from tests.support.ranks import run_ranks


def test_ranks_that_are_missing_or_elsewhere_are_named_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(rank_attacks.absences, tmp_path, 2)
    for told in (first, second):
        for name in ("more steps", "no load", "no save"):
            assert told[name].startswith("RankFailedError: rank "), told
        assert "leaves the offload block after step 1" in told["more steps"]
        assert "loads a checkpoint (steps taken in this block: 0)" in told["no load"]
        assert "fetches the weights of layers.0.weight" in told["no load"]
        assert "saves after step 1" in told["no save"]
        assert "leaves the offload block after step 1" in told["no save"]
        assert "r1-0.safetensors" in told["file"]
        assert told["nothing"] == ""
    for name in ("nobody at load", "nobody again"):
        assert first[name].startswith("RankFailedError: a rank was killed, or does not answer")
        assert "ranks wait 1 s for others" in first[name]
    assert list((tmp_path / ".infinity").glob("*")) == []


@pytest.mark.proof
def test_a_rank_without_room_for_its_swap_file_is_named_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(rank_attacks.full_disks, tmp_path, 2)
    why = "AioError: cannot allocate "
    assert second["full"].startswith(why), second
    assert "state.swap: File too large; the swap files take " in second["full"], second
    assert first["full"].startswith(f"RankFailedError: rank 1 failed: {why}"), first
    assert first["then"] == second["then"] == ""
    assert list((tmp_path / ".infinity").glob("*")) == []


def test_a_step_that_one_rank_cannot_finish_gives_no_rank_values_of_two_moments(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(rank_attacks.unfinished_steps, tmp_path, 2)
    assert first["full"].startswith("RankFailedError: rank 1 failed: AioError: full"), first
    assert second["full"].startswith("AioError: full"), second
    for told in (first, second):
        assert told["on meta"] == [f"layers.{number}.weight" for number in range(3)]
        assert told["other"] == []
        assert told["then"] == ""
    assert list((tmp_path / ".infinity").glob("*")) == []


def test_a_change_that_one_rank_cannot_keep_is_kept_by_none(tmp_path: Path) -> None:
    first, second = run_ranks(rank_attacks.unkept_changes, tmp_path, 2)
    assert first["full"].startswith("RankFailedError: rank 1 failed: AioError: full"), first
    assert second["full"].startswith("AioError: full"), second
    for told in (first, second):
        assert told["then"] == ""
        assert told["changed"] == [0, 1]


def test_a_change_that_interrupts_come_to_on_all_ranks_is_of_all_of_them_or_of_none(
    tmp_path: Path,
) -> None:
    """One had its part of the weight from before, the other from after."""
    first, second = run_ranks(rank_attacks.interrupted_change, tmp_path, 2)
    assert first == second
    assert first["interrupted"]
    assert first["changed"] in (0, 1)


def test_interrupts_as_the_block_ends_leave_every_rank_its_values(tmp_path: Path) -> None:
    """A rank met the others once more for what they had passed on, or told them that it had
    failed: all waited for each other, and the values that each had a part of were gone.
    """
    for told in run_ranks(rank_attacks.interrupted_ends, tmp_path, 2):
        assert told
        assert told == {place: [True, True] for place in told}


def test_weights_of_ranks_of_which_one_took_no_part_in_a_step_are_not_mixed(tmp_path: Path) -> None:
    """Half of a weight was from after the step and half from before it, without a word."""
    first, second = run_ranks(rank_attacks.half_taken_step, tmp_path, 2)
    assert [first["interrupted"], second["interrupted"]] == [False, True]
    for told in (first, second):
        assert told["changed"] == []
        assert "(steps taken in this block: 0)" in told["then"]
        assert "(steps taken in this block: 1)" in told["then"]


def test_a_change_of_one_rank_is_not_taken_for_what_another_reads(tmp_path: Path) -> None:
    """The one was told of other values, and the other waited for it until the timeout."""
    for told in run_ranks(rank_attacks.other_values, tmp_path, 2):
        assert told["told"].startswith("RankFailedError: rank "), told
        assert "reads the values of layers.0.weight" in told["told"]
        assert "changes the values of layers.0.weight" in told["told"]


def test_an_interrupt_behind_a_meeting_lets_no_rank_wait(tmp_path: Path) -> None:
    """The others waited until the timeout for what it did not send, and it for them."""
    for told in run_ranks(rank_attacks.interrupted_meetings, tmp_path, 2, timeout_seconds=8):
        for name, said in told.items():
            assert said == "" or said.startswith("RankFailedError: rank "), (name, said)
            assert "every rank has to do the same" in said or not said, (name, said)


def test_a_step_that_is_taken_again_behind_an_interrupt_has_all_gradients(tmp_path: Path) -> None:
    """Those of the last pass that ranks had just exchanged were not in it, without a word."""
    for told in run_ranks(rank_attacks.interrupted_means, tmp_path, 2):
        assert told["slices"] == told["bucket"] == [True, True, ""], told
        assert "was lost on its way" in told["means"][-1], told


def test_an_interrupt_in_a_save_or_a_load_lets_no_rank_wait(tmp_path: Path) -> None:
    """Where a rank was to do it again, all waited for each other until the timeout."""
    first, second = run_ranks(rank_attacks.interrupted_calls, tmp_path, 2, timeout_seconds=8)
    assert [told[0] for told in second.values()] == ["interrupted"] * 3
    why = "RankFailedError: rank 1 failed: KeyboardInterrupt"
    assert [told[0][: len(why)] for told in first.values()] == [why] * 3
    assert first["save"][1:] == second["save"][1:] == ["", ""]
    for name in ("load", "loaded"):
        assert "KeyboardInterrupt" in first[name][1]
        assert "does not answer" not in str(first[name] + second[name])


def interrupted_behind_another_save(rank: int, folder: Path) -> list[str]:
    """Ctrl-C comes to rank 1 as it waits for the others to save, while they finish a save in the
    background. What a rank is told of the save, of the same again and of the one before.
    """
    told: list[str] = []
    model, goes_on = stack(768), Event()
    write, meet = running._write, Zero3.meet

    def held(*given: Any) -> dict[str, int]:
        goes_on.wait()
        return write(*given)

    def met(ranks: Zero3, kind: int, step: int) -> None:
        meet(ranks, kind, step)
        goes_on.set()
        pending.result()
        if rank == 1 and not told:
            os.kill(os.getpid(), signal.SIGINT)

    with infinity.offload(model, folder, host_memory="256MiB", process_group=world()) as offloaded:
        vector_loss(model, 0, width=768).backward()
        offloaded.step()
        with patch.object(running, "_write", held), ExitStack() as later:
            pending = offloaded.save(folder / "first", block=False)
            later.enter_context(patch.object(Zero3, "meet", met))
            for _ in range(2):
                try:
                    told.append(complaint(lambda: offloaded.save(folder / "second")))
                except KeyboardInterrupt:
                    told.append("interrupted")
    return told


def test_an_interrupt_in_a_save_lets_no_rank_wait_where_another_ends_meanwhile(
    tmp_path: Path,
) -> None:
    """What ranks told each other of that was taken for what they told of the interrupt."""
    first, second = run_ranks(interrupted_behind_another_save, tmp_path, 2, timeout_seconds=8)
    assert first[0].startswith("RankFailedError: rank 1 failed: KeyboardInterrupt")
    assert second[0] == "interrupted"
    assert first[1] == second[1] == ""
