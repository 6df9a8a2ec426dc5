"""What a disk may hold after a power cut, and what is found on it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crashes.disk import NEVER, TOP, Barrier, Disk, History, Length, Names, State, Tree, Write
from crashes.promises import Promise
from crashes.recording import record
from crashes.scenarios import SCENARIOS
from crashes.states import Window, states, windows
from crashes.tracing import unavailable_reason
from crashes.trials import try_out

from tests.support.proof import matrix

_reason = unavailable_reason()
needs_strace = pytest.mark.skipif(_reason is not None, reason=str(_reason))
MEMORY = Path("/dev/shm")


@pytest.fixture
def top() -> Iterator[Path]:
    """Where a scenario runs: in memory, since what is durable there does not matter."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield Path(folder) / "top"


def contents(tree: Tree) -> dict[str, bytes | None]:
    return {
        path: None if content is None else content.data for path, content in tree.contents.items()
    }


def all_trees(history: History, count: int = 1000) -> list[tuple[Window, dict[str, bytes | None]]]:
    disk = Disk(history)
    return [
        (window, contents(disk.tree(state)))
        for window in windows(history)
        for state in states(history, window, count, 0)
    ]


def history_of(*effects: Names | Write | Length, kinds: dict[int, bool]) -> History:
    history = History({})
    history.kinds.update(kinds)
    for effect in effects:
        history.add(effect)
    return history


class TestDisk:
    def test_effects_are_open_until_a_sync_that_began_behind_them(self) -> None:
        history = history_of(
            Names(0, 0, "create a", {(TOP, "a"): 1}),
            Write(1, 1, "write", 1, 0, b"x"),
            Write(2, 4, "write that is on its way", 1, 1, b"y"),
            kinds={1: False},
        )
        history.sync(1, begin=3, end=5)
        assert [effect.synced for effect in history.effects] == [NEVER, 5, NEVER]
        history.sync(TOP, begin=6, end=7)
        assert [effect.synced for effect in history.effects] == [7, 5, NEVER]
        assert [(w.certain, w.open) for w in windows(history)] == [
            ((), (0, 1, 2)),
            ((1,), (0, 2)),
            ((0, 1), (2,)),
        ]

    def test_a_directory_whose_name_is_lost_takes_what_is_in_it(self) -> None:
        history = history_of(
            Names(0, 0, "make d", {(TOP, "d"): 1}),
            Names(1, 1, "create d/f", {(1, "f"): 2}),
            kinds={1: True, 2: False},
        )
        history.sync(1, begin=2, end=2)
        found = [tree for window, tree in all_trees(history) if 1 in window.certain]
        assert found == [{}, {"d": None, "d/f": b""}]

    def test_a_rename_takes_one_name_for_the_other_at_once(self) -> None:
        history = history_of(
            Names(0, 0, "create a", {(TOP, "a"): 1}),
            Names(1, 1, "create b", {(TOP, "b"): 2}),
            kinds={1: False, 2: False},
        )
        history.sync(None, begin=2, end=2)
        history.add(Names(3, 3, "rename b as a", {(TOP, "a"): 2, (TOP, "b"): None}))
        (*_, last) = windows(history)
        disk = Disk(history)
        inodes = [dict(disk.tree(state).inodes) for state in states(history, last, 9, 0)]
        assert inodes == [{"a": 1, "b": 2}, {"a": 2}]

    def test_a_torn_write_has_its_length_and_some_of_its_sectors(self) -> None:
        history = history_of(
            Names(0, 0, "create a", {(TOP, "a"): 1}),
            Write(1, 1, "old", 1, 0, b"o" * 1536),
            kinds={1: False},
        )
        history.sync(None, begin=2, end=2)
        history.add(Write(3, 3, "new", 1, 512, b"n" * 1024 + b"e"))
        (*_, last) = windows(history)
        found = {contents(Disk(history).tree(s))["a"] for s in states(history, last, 99, 0)}
        assert b"o" * 1536 in found
        assert b"o" * 1536 + b"\0" in found
        whole = b"o" * 512 + b"n" * 1024 + b"e"
        assert whole in found
        for data in found - {whole}:
            assert data is not None
            sectors = [data[at : at + 512] for at in range(0, 1536, 512)]
            assert set(sectors) <= {b"o" * 512, b"n" * 512}
        assert len(found) > 3

    def test_hard_links_are_told_from_copies(self) -> None:
        links = history_of(
            Names(0, 0, "a", {(TOP, "a"): 1, (TOP, "b"): 1}), kinds={1: False, 2: False}
        )
        copies = history_of(
            Names(0, 0, "a", {(TOP, "a"): 1, (TOP, "b"): 2}), kinds={1: False, 2: False}
        )
        everything: State = {0: None}
        trees = [Disk(history).tree(everything) for history in (links, copies)]
        assert contents(trees[0]) == contents(trees[1])
        assert trees[0].digest() != trees[1].digest()


class TestStates:
    def test_few_open_effects_give_every_subset(self) -> None:
        names = [Names(n, n, f"{n}", {(TOP, f"{n}"): n + 1}) for n in range(4)]
        history = history_of(*names, kinds={n + 1: False for n in range(4)})
        assert len({frozenset(tree) for _, tree in all_trees(history)}) == 2**4

    def test_many_open_effects_give_as_many_states_as_were_asked_for(self) -> None:
        names = [Names(n, n, f"{n}", {(TOP, f"{n}"): n + 1}) for n in range(20)]
        history = history_of(*names, kinds={n + 1: False for n in range(20)})
        (window,) = windows(history)
        chosen = [frozenset(state) for state in states(history, window, 500, seed=3)]
        assert len(chosen) == 500
        assert {frozenset(range(n)) for n in range(21)} <= set(chosen)
        assert chosen == [frozenset(state) for state in states(history, window, 500, seed=3)]
        assert chosen != [frozenset(state) for state in states(history, window, 500, seed=4)]

    def test_what_was_said_counts_from_its_moment_on(self) -> None:
        history = History({}, barriers=[Barrier(1, "begun/1"), Barrier(2), Barrier(3, "begun/2")])
        said = [Promise.of(window.said) for window in windows(history)]
        assert said == [Promise(0, 0), Promise(1, 0), Promise(1, 0), Promise(2, 0)]


REPLACE = """
import os, sys
top, steps = sys.argv[1], sys.argv[2].split()

def sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)

for content in (b"old" * 400, b"new" * 500):
    with open(top + "/new", "wb") as file:
        file.write(content)
    for step in steps:
        if step == "file":
            sync(top + ("/new" if os.path.exists(top + "/new") else "/file"))
        elif step == "rename":
            os.rename(top + "/new", top + "/file")
        else:
            sync(top)
    os.access("/crash-states/reported/" + content[:3].decode(), os.F_OK)
"""
OLD, NEW = b"old" * 400, b"new" * 500


def found_in(top: Path, steps: str) -> dict[str, set[bytes | None]]:
    """What a file may hold, by what was reported last, for a program that replaces it like this."""
    top.mkdir()
    command = [sys.executable, "-I", "-S", "-c", REPLACE, str(top), steps]
    with tempfile.NamedTemporaryFile() as output:
        history = record(command, top, Path(output.name))
    found: dict[str, set[bytes | None]] = {}
    for window, tree in all_trees(history):
        last = window.said[-1] if window.said else ""
        found.setdefault(last, set()).add(tree.get("file"))
    return found


@needs_strace
class TestRecorded:
    def test_a_file_that_is_replaced_in_order_is_the_old_one_or_the_new_one(
        self, top: Path
    ) -> None:
        found = found_in(top, "file rename directory")
        assert found == {"": {None, OLD}, "reported/old": {OLD, NEW}, "reported/new": {NEW}}

    def test_a_rename_before_the_sync_is_found(self, top: Path) -> None:
        found = found_in(top, "rename file directory")
        assert b"" in found["reported/old"]
        assert b"\0" * len(NEW) in found["reported/old"]
        assert found["reported/new"] == {NEW}

    def test_a_missing_sync_of_the_file_is_found(self, top: Path) -> None:
        assert {b"", b"\0" * len(NEW), NEW} <= found_in(top, "rename directory")["reported/new"]

    def test_a_missing_sync_of_the_directory_is_found(self, top: Path) -> None:
        assert found_in(top, "file rename")["reported/new"] == {None, OLD, NEW}

    def test_a_record_that_is_not_what_was_done_is_an_error(self, top: Path) -> None:
        top.mkdir()
        code = "import os, sys; os.symlink('nowhere', sys.argv[1] + '/link')"
        command = [sys.executable, "-I", "-S", "-c", code, str(top)]
        with (
            tempfile.NamedTemporaryFile() as output,
            pytest.raises(Exception, match="symlink is not among"),
        ):
            record(command, top, Path(output.name))


@needs_strace
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("name", matrix(SCENARIOS, usual=["restriped"]))
def test_whatever_the_power_leaves_of_a_save_holds_what_was_promised(
    name: str, top: Path, request: pytest.FixtureRequest, counted: Callable[..., None]
) -> None:
    """Takes the time of a program that imports torch; see `tools/crash_states.py` for more."""
    is_proof = request.node.get_closest_marker("proof") is not None
    counts = try_out(SCENARIOS[name], top, count=600 if is_proof else 150, seed=0)
    assert counts.faults == []
    assert counts.different > 30
    counted("crash states", enumerated=counts.states, loaded=counts.different)
