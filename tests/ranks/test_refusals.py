"""A save that fails on one rank: every rank is told in the same place, and the next save works."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support import rank_refusals
from tests.support.ranks import run_ranks

AT_THE_CALL = ("plan", "engine", "memory", "thread", "leaf", "guard")
BY_THE_RESULT = ("copy", "staging", "write")


def test_a_background_save_that_fails_on_one_rank_is_told_in_one_place_on_all(
    tmp_path: Path,
) -> None:
    every = run_ranks(rank_refusals.background_failures, tmp_path, 3)
    for place, stages in (("call", AT_THE_CALL), ("result", BY_THE_RESULT)):
        for stage in stages:
            for rank, told in enumerate(every):
                where, what = told[stage]
                assert where == place, (stage, rank, what)
                failed = "RankFailedError: rank 1 failed: "
                assert what.startswith(failed) == (rank != 1), (stage, rank, what)
                assert what.removeprefix(failed) == every[1][stage][1], (stage, rank)
    for told in every:
        for stage, outcome in told.items():
            if stage not in AT_THE_CALL + BY_THE_RESULT:
                assert outcome == ["result", ""], (stage, outcome)


def test_ranks_that_are_given_other_stripes_or_cannot_look_are_told_on_all(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(rank_refusals.differing_calls, tmp_path, 2)
    for told in (first, second):
        assert told["stripes on 1"].startswith("ValueError: rank 1 is given stripe_dirs, rank 0")
        assert told["stripes on 0"].startswith("ValueError: rank 0 is given stripe_dirs, rank 1")
        assert told["steps"] == "[1, 2]"
    for name in ("order", "order, behind"):
        assert first[name] == "OSError: [Errno 5] Input/output error: 'a manifest'"
        assert second[name] == f"RankFailedError: rank 0 failed: {first[name]}"
    for name, what in (
        ("step", "ValueError: step='3' is not a number of steps"),
        ("step, behind", "ValueError: step=-1 is not a number of steps"),
        ("load", "ValueError: step='3' is not a number of steps"),
        ("path", "TypeError: "),
        ("staging", "TypeError: staging_bytes='1GiB' is no number"),
        ("staging, behind", "TypeError: staging_bytes='1GiB' is no number"),
    ):
        assert second[name].startswith(what)
        assert first[name].startswith(f"RankFailedError: rank 1 failed: {what}"), name


def test_an_interrupt_before_a_save_begins_is_told_to_the_ranks_that_wait(tmp_path: Path) -> None:
    first, second = run_ranks(rank_refusals.interrupted_saves, tmp_path, 2)
    for name in ("settling", "starting"):
        assert second[name] == "interrupted"
        assert first[name].startswith("RankFailedError: rank 1 failed: KeyboardInterrupt"), name
        assert first[f"after {name}"] == second[f"after {name}"] == ""


def test_an_interrupt_as_a_block_begins_is_told_to_the_ranks_that_wait(tmp_path: Path) -> None:
    """They waited until their timeout, and so did all later blocks of the group."""
    first, second = run_ranks(rank_refusals.interrupted_blocks, tmp_path, 2, timeout_seconds=5.0)
    assert first == ["RankFailedError: rank 1 failed: KeyboardInterrupt: ", "", ""]
    assert second == ["interrupted", "", ""]


def test_an_interrupt_as_a_model_is_offloaded_is_told_to_the_ranks_that_train(
    tmp_path: Path,
) -> None:
    """Its rank met them as if its block had ended, and raised in place of the interrupt that they
    did something else.
    """
    first, second = run_ranks(rank_refusals.interrupted_beginnings, tmp_path, 2)
    assert first == ["RankFailedError: rank 1 failed: KeyboardInterrupt: ", ""]
    assert second == ["interrupted", ""]


def test_an_interrupt_while_bytes_are_moved_is_told_to_the_other_ranks_by_its_name(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(rank_refusals.interrupted_transfers, tmp_path, 2)
    for name, told in second.items():
        assert told == "interrupted", name
        assert first[name].startswith("RankFailedError: rank 1 failed: KeyboardInterrupt"), first


def test_what_a_handler_raises_while_a_rank_waits_is_told_as_it_is(tmp_path: Path) -> None:
    told = run_ranks(rank_refusals.errors_of_handlers, tmp_path, 2)
    assert told == ["RuntimeError: of the handler", ""]


def test_a_rank_that_other_ranks_failed_tells_those_it_saves_with(tmp_path: Path) -> None:
    first, second = run_ranks(rank_refusals.failures_elsewhere, tmp_path, 2)
    assert first[0] == "RankFailedError: rank 7 of another group failed"
    assert second[0] == f"RankFailedError: rank 0 failed: {first[0]}"
    assert first[1] == second[1] == ""


def test_ranks_that_call_different_things_are_told_which_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(rank_refusals.other_operations, tmp_path, 2)
    others = (
        "asks for the steps that can be loaded",
        "asks for the latest step",
        "loads a checkpoint",
    )
    for there, here, other in zip(first, second, others, strict=True):
        found = re.findall(r"rank \d [^(]+ \(exchange \d+\)", there)
        assert [entry.split(" (")[0] for entry in found] == [
            "rank 0 saves a checkpoint",
            f"rank 1 {other}",
        ]
        assert found == re.findall(r"rank \d [^(]+ \(exchange \d+\)", here)[::-1]


def test_a_step_that_one_rank_cannot_finish_is_told_by_what_all_save_and_export(
    tmp_path: Path,
) -> None:
    """The others wait for nobody, and the next call works."""
    first, second = run_ranks(rank_refusals.unfinished_steps, tmp_path, 2)
    for name in ("save", "export"):
        assert first[name][0].startswith("AioError"), first
        assert second[name][0].startswith("RankFailedError: rank 0 failed: AioError"), second
        assert first[name][1] == second[name][1] == ""


def test_a_stopped_step_that_one_rank_cannot_forget_fails_a_load_on_all_at_once(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(rank_refusals.steps_not_forgotten, tmp_path, 2)
    assert first[0].startswith("OSError"), first
    assert first[1].startswith("MemoryError"), first
    failed = "RankFailedError: rank 0 failed: "
    assert second[0].startswith(f"{failed}OSError"), second
    assert second[1].startswith(f"{failed}MemoryError"), second
    assert first[2:] == second[2:] == ["", ""]


def test_a_rank_that_was_given_up_meets_the_others_when_all_try_again(tmp_path: Path) -> None:
    first, second, third = run_ranks(rank_refusals.missed_meetings, tmp_path, 3)
    for name in ("missing", "block"):
        for told in (first[name], third[name]):
            assert "ranks [1] have not made their GroupCoordinator within" in told, told
    for name in ("coordinator", "next block"):
        assert first[name] == second[name] == third[name] == "", (first, second, third)
