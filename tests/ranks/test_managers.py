"""A series of checkpoints that several ranks save, load and look through together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import rank_calls, rank_managers
from tests.support.proof import matrix
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("world_size", matrix([2, 3], usual=[2]))
def test_ranks_save_keep_and_load_a_series_of_checkpoints_together(
    tmp_path: Path, world_size: int
) -> None:
    every = run_ranks(rank_managers.series, tmp_path, world_size)
    for told in every:
        assert told["empty"][:2] == [None, []]
        assert told["empty"][2].startswith("FileNotFoundError")
        assert told["steps"] == [4, 5, 6]
        assert told["whole"]
        assert told["latest"] == [6, 6, 4]
        assert told["missing"].startswith("FileNotFoundError")
        assert told["damaged"][:2] == [6, 5], "the files of 6 are as long as they should be"
        assert told["unseen"] == [4, [4]]
        assert told["other step"] == (
            "ValueError: rank 0 saves to step-10, rank 1 to step-11; every rank has to give the "
            "same path"
        )
        assert told["other load"] == "ValueError: rank 0 loads step 4, rank 1 step 5"
        assert told["after"] == [4, 5, 6]
        assert told["end"] == [4, 5, 6, 8], "6 was passed over, and does not count as kept"
        assert told["folders"] == ["step-4", "step-5", "step-6", "step-8"]
    assert every[1]["damaged"][2].startswith("CorruptCheckpointError"), every[1]["damaged"]
    assert every[0]["damaged"][2].startswith("RankFailedError: rank 1 failed: CorruptCheckpoint")
    assert every[0]["unasked"].startswith("RankFailedError: rank 1 failed: OSError")
    for name in ("room", "room, behind", "next"):
        assert "[Errno 28]" in every[1][name]
        assert every[1][name].startswith("OSError")
        assert every[0][name].startswith("RankFailedError: rank 1 failed: OSError: [Errno 28]")


def test_damage_of_a_step_that_one_rank_loads_by_its_number_keeps_the_sound_one(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(rank_managers.damage_by_number, tmp_path, 2)
    assert second["load"].startswith("CorruptCheckpointError")
    assert first["load"].startswith("RankFailedError: rank 1 failed: CorruptCheckpointError")
    assert first["kept"] == second["kept"] == [1, 2, 3]


def test_nothing_whole_goes_before_a_save_of_ranks_comes_through(tmp_path: Path) -> None:
    """What one of them knows to be damaged counts for nothing that is kept."""
    every = run_ranks(rank_managers.left_behind, tmp_path, 2)
    assert every[1]["read"].startswith("CorruptCheckpointError")
    for told in every:
        assert "[Errno 28]" in told["first"]
        assert told["first left"] == ["step-1", "step-2", "step-3"]
        assert "[Errno 28]" in told["second"]
        assert told["second left"] == ["step-1", "step-2", "step-3"]
        assert told["kept"] == [3, 4], "of 3 the files are as long as they should be"
        assert told["left"] == ["step-3", "step-4"]


def test_damage_that_one_rank_reads_by_itself_keeps_the_sound_one(tmp_path: Path) -> None:
    first, second = run_ranks(rank_managers.damage_apart, tmp_path, 2)
    assert second["load"].startswith("CorruptCheckpointError")
    assert first["kept"] == second["kept"] == [[1], [1, 2], [1, 2, 3], [3, 4]]


def test_values_of_a_step_that_another_rank_passes_over_are_told(tmp_path: Path) -> None:
    first, second = run_ranks(rank_managers.values_of_a_step_passed_over, tmp_path, 2)
    for name in ("new", "pair"):
        assert second[name].startswith("CorruptCheckpointError"), second
        assert f"{name}" in second[name].partition("of into may hold")[0], second
        assert first[name].startswith("RankFailedError: rank 1 failed: CorruptCheckpointError")
    for told in (first, second):
        assert told["both"] == ""
        assert told["loaded"] == [1, True]


def test_calls_in_handlers_that_would_wait_for_what_they_broke_into_are_refused(
    tmp_path: Path,
) -> None:
    for rank, told in enumerate(run_ranks(rank_managers.calls_in_handlers, tmp_path, 2)):
        assert told.pop("after") == [0, 4]
        assert told.pop("unhandled").startswith(f"RuntimeError: rank {rank} saves a checkpoint in")
        for name, (loaded, heard) in told.items():
            assert loaded == 1, name
            (complaint,) = heard
            assert complaint.startswith(f"RuntimeError: rank {rank} "), name
            assert complaint.endswith("set a flag there, and make the call later"), name


def test_calls_of_what_is_loaded_into_or_saved_that_would_wait_for_that_are_refused(
    tmp_path: Path,
) -> None:
    ranks = run_ranks(rank_calls.calls_of_sources_and_sinks, tmp_path, 2)
    for kind in ("sink", "source"):
        for name in ("latest", "save"):
            called = f"{name}, {kind}"
            every = [(rank, one) for rank, told in enumerate(ranks) for one in told[called]]
            assert len(every) >= 2, (kind, name)
            for rank, complaint in every:
                assert complaint.startswith(f"RuntimeError: rank {rank} "), complaint
                assert "in the midst of another call with the same coordinator" in complaint
        alone = [one for told in ranks for one in told[f"of one process, {kind}"]]
        assert len(alone) >= 2
        assert set(alone) == {""}


def test_step_of_which_damage_was_mended_or_replaced_is_kept_and_removed_as_others_are(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(rank_calls.damage_mended, tmp_path, 2)
    assert first == second == [[1, 2, 3], [3, 4], [3, 4, 5], [4, 5]]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("wanted", "seed"), matrix([(12, 0), *[(40, seed) for seed in (1, 5, 9)]], usual=[(12, 0)])
)
def test_rank_that_is_interrupted_anywhere_in_a_look_tells_the_others(
    tmp_path: Path, wanted: int, seed: int
) -> None:
    told, lines = run_ranks(rank_managers.interrupted_looks, tmp_path, 2, wanted=wanted, seed=seed)
    for name, heard in told.items():
        assert len(heard) == len(lines[name])
        for complaint, line in zip(heard, lines[name], strict=True):
            is_told = complaint.startswith("RankFailedError: rank 1 failed: Interrupted")
            assert is_told or complaint == "", f"{name} interrupted at {line}: {complaint}"
        assert any(lines[name]), name
        assert any(heard), name


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("wanted", "seed"), matrix([(6, 0), *[(25, seed) for seed in range(6)]], usual=[(6, 0)])
)
def test_rank_that_is_interrupted_anywhere_in_a_save_tells_the_others_or_all_have_saved(
    tmp_path: Path, wanted: int, seed: int
) -> None:
    told, lines = run_ranks(rank_managers.interrupted_saves, tmp_path, 2, wanted=wanted, seed=seed)
    for name, points in told.items():
        for (_, heard, is_there), (line, *_) in zip(points, lines[name], strict=True):
            is_told = heard.startswith("RankFailedError: rank 1 failed: Interrupted")
            assert is_told or (heard, is_there) == ("", "True"), f"{name} at {line}: {heard}"
        assert any(heard for _, heard, _ in points), name


def test_constructor_that_raises_on_one_rank_raises_on_all_by_name(tmp_path: Path) -> None:
    first, second = run_ranks(rank_managers.refused_constructors, tmp_path, 2)
    for name, error in {
        "seconds": "TypeError: timeout_seconds='odd' is a str, not a number of seconds",
        "no time": "ValueError: timeout_seconds=-1 is no time to wait",
        "name": "TypeError: name is a str, not a function",
        "keep": "TypeError: keep='odd' is no int",
        "engine": "TypeError: engine is a str, not an aio.Engine",
        "stripe_dirs": "TypeError: stripe_dirs is a int, not a path",
    }.items():
        assert second[name].startswith(error), second[name]
        assert first[name].startswith(f"RankFailedError: rank 1 failed: {error}"), first[name]
    assert first["then"] == second["then"] == ""
    assert first["missing"].startswith("RankFailedError: ranks [1] have not made their")
