"""One input after the other, within bounds of time and memory; what leads somewhere new is kept."""

from __future__ import annotations

import faulthandler
import json
import random
import re
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from fuzzing.mutations import mutated
from fuzzing.targets import TARGETS, place_of
from fuzzing.tracing import Line, is_ours, traced

SECONDS = 5.0
"""Of a processor, that an input may take with every line of it traced."""
PATIENCE_SECONDS = 60.0
"""After which an input hangs: where all threads are is printed, and the process ends."""
KIBIBYTES = 256 << 10
"""That the process may grow by, at most, in one input."""
_TEXT = 2000
"""Characters of a message: inputs are megabytes, what is said of them is not."""


class Rounds:
    """Tries inputs of one target. The one that is tried is at ``current`` in its folder."""

    def __init__(self, name: str, seed: int, folder: Path, corpus: Iterable[bytes]) -> None:
        self.name = name
        self.tried = 0
        self.corpus = by_size({*corpus, *TARGETS[name].first()})
        self.lines: set[Line] = set()
        self._chance = random.Random(f"{seed} {name}")
        self._current = folder / f"{name}.current"
        self._attempt = TARGETS[name].prepare(place_of(name, folder))

    def replay(self) -> list[str]:
        """Tries what is in the corpus already; gives what did not hold."""
        return [fault for given in self.corpus for fault in self.attempt(given)[1]]

    def next(self) -> list[str]:
        """Tries a new one, and keeps it if it led somewhere new; gives what did not hold."""
        given = mutated(self._chance.choice(self.corpus), self.corpus, self._chance)
        is_new, faults = self.attempt(given)
        if is_new and not faults:
            self.corpus.append(given)
        return faults

    def attempt(self, given: bytes) -> tuple[bool, list[str]]:
        """Whether an input led somewhere new, and what did not hold."""
        self._current.write_bytes(given)
        self.tried += 1
        faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
        lines: set[Line] = set()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
        before, started = _peak_kibibytes(), time.process_time()
        try:
            with traced(lines):
                self._attempt(given)
            fault = ""
        except Exception as error:
            fault = self._wrong(error)
        seconds, grown = time.process_time() - started, _peak_kibibytes() - before
        faulthandler.cancel_dump_traceback_later()
        is_new = not lines <= self.lines
        self.lines |= lines
        faults = [fault] if fault else []
        faults += [f"took {seconds:.1f} seconds"] * (seconds > SECONDS)
        faults += [f"took {grown} KiB of memory"] * (grown > KIBIBYTES)
        return is_new, [f"{self.name}: {given[:300]!r}: {fault}" for fault in faults]

    def _wrong(self, error: Exception) -> str:
        """What is wrong with an error: its kind, who raised it, or that it says too much."""
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}"
        kind = type(error).__name__
        if not isinstance(error, TARGETS[self.name].allowed):
            return f"{kind} at {where}: {str(error)[:300]}"
        names_file = isinstance(error, OSError) and error.filename
        if not (names_file or is_ours(frames[-1].filename)):
            return f"{kind} that is not ours at {where}: {str(error)[:300]}"
        return f"{kind} of {len(str(error))} characters" if len(str(error)) > _TEXT else ""


def by_size(inputs: Iterable[bytes]) -> list[bytes]:
    """The smallest first."""
    return sorted(inputs, key=lambda given: (len(given), given))


def smallest(rounds: Callable[[], Rounds], inputs: Iterable[bytes], most_bytes: int) -> list[bytes]:
    """Of inputs those that lead somewhere that no smaller ones lead."""
    again = rounds()
    return [
        given
        for given in by_size(set(inputs))
        if len(given) <= most_bytes and again.attempt(given)[0]
    ]


def read_corpus(file: Path) -> list[bytes]:
    """Inputs, one a line: a JSON string with a character for each byte."""
    if not file.exists():
        return []
    return [json.loads(line).encode("latin-1") for line in file.read_text().splitlines()]


def write_corpus(file: Path, inputs: Iterable[bytes]) -> None:
    """What `read_corpus` reads."""
    file.write_text("".join(json.dumps(given.decode("latin-1")) + "\n" for given in inputs))


def _peak_kibibytes() -> int:
    status = Path("/proc/self/status").read_text()
    (line,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(line)
