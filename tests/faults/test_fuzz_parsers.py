"""Inputs that nobody made for the parsers load or are refused by name, see `tools/fuzz_parsers.py`.

`corpus` has inputs that the program found to lead somewhere new, one a line, for each parser.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzzing import tracing
from fuzzing.rounds import Rounds, read_corpus, write_corpus
from fuzzing.targets import TARGETS, Target

from checkpoint.errors import CorruptCheckpointError

ROOT = Path(__file__).parents[2]
MEMORY = Path("/dev/shm")


def _fuzz(tmp_path: Path, minutes: float, *options: str) -> str:
    folder = MEMORY if MEMORY.is_dir() else tmp_path
    program = [sys.executable, str(ROOT / "tools" / "fuzz_parsers.py")]
    done = subprocess.run(
        [*program, "--minutes", str(minutes), "--folder", str(folder), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def test_inputs_that_were_kept_load_or_are_refused_by_name(tmp_path: Path) -> None:
    """Takes the time of a program that imports torch."""
    told = _fuzz(tmp_path, 0.0)
    assert told.endswith(" inputs, 0 of them bad")
    assert int(told.split()[0]) > 50


@pytest.mark.proof
def test_inputs_changed_for_a_minute_load_or_are_refused_by_name(
    tmp_path: Path, counted: Callable[..., None]
) -> None:
    counted("fuzzing", inputs=int(_fuzz(tmp_path, 1.0).split()[0]))


def _refuses(given: bytes) -> object:
    if given == b"named":
        raise CorruptCheckpointError("not what was saved")
    known: dict[bytes, int] = {}
    return known[given] if given == b"unnamed" else int(given)


def test_error_that_is_not_named_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(lambda _: _refuses, lambda: [b"1"], (CorruptCheckpointError, ValueError))
    monkeypatch.setitem(TARGETS, "refuses", target)
    monkeypatch.setattr(tracing, "_INSIDE", (*tracing._INSIDE, __file__))
    rounds = Rounds("refuses", 0, tmp_path, [])
    assert rounds.replay() == []
    assert rounds.attempt(b"named") == (True, [])
    (unnamed,) = rounds.attempt(b"unnamed")[1]
    assert "KeyError" in unnamed
    monkeypatch.undo()
    monkeypatch.setitem(TARGETS, "refuses", target)
    (theirs,) = rounds.attempt(b"x")[1]
    assert "ValueError that is not ours" in theirs


def test_what_leads_somewhere_new_is_kept_and_read_again(tmp_path: Path) -> None:
    kept = [b"", b"\0\xff", b'{"a": 1}\n']
    write_corpus(tmp_path / "kept.jsonl", kept)
    assert read_corpus(tmp_path / "kept.jsonl") == kept
