"""The command `ckpt-bench`."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from aio import naming
from aio.process import output
from checkpoint.bench.conditions.arguments import STDOUT, Options, UsageError, parse_arguments
from checkpoint.bench.conditions.machine import describe_directory, describe_machine
from checkpoint.bench.conditions.pagecache import PageCache
from checkpoint.bench.conditions.scratch import DiskSpaceError, check_space, open_scratch
from checkpoint.bench.conditions.units import format_size
from checkpoint.bench.conditions.workload import CheckError, State
from checkpoint.bench.measure.comparisons import Comparison, compare
from checkpoint.bench.measure.measuring import (
    REHEARSAL_BYTES,
    Measurement,
    OnStep,
    needed_bytes,
    old_objects_set_aside,
)
from checkpoint.bench.measure.results import Recommendation, Results, recommend, summarize
from checkpoint.bench.measure.schedule import Schedule, limit_directories, plan_schedule
from checkpoint.bench.output.files import write_output
from checkpoint.bench.output.plot import draw
from checkpoint.bench.output.report import to_json
from checkpoint.bench.output.table import (
    closing_notes,
    comparison_table,
    recommendation_text,
    results_table,
)

EXIT_FAILED, EXIT_USAGE = 1, 2
_STDERR = "standard error"
_MAX_WIDTH = 400


class _EndedError(BaseException):
    """A signal has asked for the end. Not an Exception, so that nothing on the way keeps it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 if measuring failed, 2 for arguments, 128 and the signal's number after one."""
    console = Console(stderr=True)
    _log_once_to(console)
    output.escape_others()
    try:
        options = parse_arguments(argv)
        schedule = plan_schedule(options)
        for contestant in schedule.contestants:
            workload = options.workloads[contestant.workload]
            needed = needed_bytes(contestant, workload.nbytes, len(workload.tensors))
            check_space(contestant.directories, needed, options.keep_free_bytes)
    except (UsageError, DiskSpaceError) as error:
        return _complain(console, error, EXIT_USAGE)
    try:
        with _signals_end() as ended:
            code = _Bench(options, schedule, console, ended).run()
        with naming(output.NAME):
            print(end="", flush=True)  # nothing where it is closed
        return code
    except BrokenPipeError:  # whoever read the results has seen enough
        output.give_up_unwritten()
        return EXIT_FAILED
    except (OSError, ValueError, CheckError, DiskSpaceError) as error:
        output.give_up_unwritten()
        return _complain(console, error, EXIT_FAILED)
    except _EndedError as ended:
        return 128 + ended.number


def _complain(console: Console, error: Exception, code: int) -> int:
    console.print(f"ckpt-bench: {error}", markup=False, highlight=False, soft_wrap=True)
    return code


@contextmanager
def _signals_end() -> Iterator[list[_EndedError]]:
    """SIGINT, SIGTERM and SIGHUP raise `_EndedError`, once: what cleans up is not interrupted. It
    is in the list as well, for where the library of a peer makes another error of it, or none.
    """
    ended: list[_EndedError] = []

    def end(number: int, _: FrameType | None) -> None:
        for other in handled:
            signal.signal(other, signal.SIG_IGN)
        ended.append(_EndedError(number))
        raise ended[0]

    handled = {number: signal.getsignal(number) for number in _ENDING}
    for number in handled:
        signal.signal(number, end)
    try:
        yield ended
    finally:
        for number, before in handled.items():
            signal.signal(number, before)


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _log_once_to(console: Console) -> None:
    """Warnings of the library, each once: an engine is made for every single save."""
    seen: set[str] = set()

    class Once(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage()
            if message not in seen:
                seen.add(message)
                console.print(f"ckpt-bench: {message}", markup=False, soft_wrap=True)

    for name in ("aio", "checkpoint"):
        logger = logging.getLogger(name)
        logger.handlers = [Once(logging.WARNING)]
        logger.propagate = False


def _print_whole(screen: Console, table: Table) -> None:
    """Lets a terminal wrap the lines of a table that is too wide, and cuts nothing off."""
    wide = Console(stderr=screen.stderr, width=_MAX_WIDTH)
    wide.width = max(wide.measure(table).maximum, screen.width)
    wide.print(table)


class _Bench:
    """One run of the program, from the states to the results."""

    def __init__(
        self,
        options: Options,
        schedule: Schedule,
        console: Console,
        ended: Sequence[_EndedError],
    ) -> None:
        self._ended = ended
        self._options = options
        self._schedule = schedule
        self._console = console
        self._cache = PageCache()

    def run(self) -> int:
        options = self._options
        used = options.directories[: max(options.stripes)]
        with open_scratch(used, options.keep_free_bytes) as scratch:
            about = self._about(scratch.homes)
            self._say_what_is_coming()
            states = [State(workload) for workload in options.workloads]
            measurement = Measurement(self._schedule.contestants, states, scratch, self._cache)
            try:
                with old_objects_set_aside(), self._progress() as on_step:
                    measurement.rehearse(on_step)
                    measurement.run(options.runs, on_step)
            except _EndedError:
                self._show(summarize(measurement.rows, limit_directories), about, partial=True)
                raise
        self._show(summarize(measurement.rows, limit_directories), about)
        return 0

    def _about(self, homes: dict[Path, Path]) -> dict[str, Any]:
        options = self._options
        return {
            "machine": describe_machine(),
            "directories": [describe_directory(*pair) for pair in homes.items()],
            "page_cache": self._cache.method,
            "verify": options.verify,
            "load_into": "live" if options.live else "new",
            "skipped": dict(self._schedule.skipped),
        }

    def _say_what_is_coming(self) -> None:
        """What a run costs the disks, before it does."""
        contestants = self._schedule.contestants
        once = sum(self._options.workloads[one.workload].nbytes for one in contestants)
        runs = self._options.runs
        self._console.print(
            f"{len(contestants)} contestants, {runs} runs each; about {format_size(once * runs)} "
            f"will be written and read",
            highlight=False,
        )

    @contextmanager
    def _progress(self) -> Iterator[OnStep]:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeRemainingColumn(),
        )
        quiet = self._options.quiet or not self._console.is_terminal
        contestants = self._schedule.contestants
        once = sum(self._options.workloads[one.workload].nbytes for one in contestants)
        rehearsal = len(contestants) * REHEARSAL_BYTES
        total = 2 * (once * self._options.runs + rehearsal)
        with Progress(*columns, console=self._console, disable=quiet, transient=True) as progress:
            task = progress.add_task("", total=total)

            def on_step(name: str, nbytes: int) -> None:
                if self._ended:
                    raise self._ended[0]
                progress.update(task, description=name, advance=nbytes)

            yield on_step

    def _show(self, results: Results, about: dict[str, Any], *, partial: bool = False) -> None:
        """Table, JSON and picture. Of a measurement that was ended, what there is of it."""
        options = self._options
        if not results.num_runs:
            return
        recommendation = recommend(results)
        comparisons = compare(results, recommendation, options.workloads)
        text = to_json(results, recommendation, comparisons, options.workloads, about)
        with ExitStack() as files:  # written whatever becomes of what is shown
            if options.plot is not None:
                files.callback(draw, results, options.workloads, options.plot)
            if options.json not in (STDOUT, None):
                files.callback(write_output, options.json, (text + "\n").encode())
            screen = Console(stderr=options.json == STDOUT)
            with naming(_STDERR if screen.stderr else output.NAME):
                if partial:
                    screen.print(f"Ended after {results.num_runs} of {options.runs} runs:")
                self._print(screen, results, comparisons, recommendation)
            if options.json == STDOUT:
                with naming(output.NAME):
                    print(text)

    def _print(
        self,
        screen: Console,
        results: Results,
        comparisons: Sequence[Comparison],
        recommendation: Recommendation | None,
    ) -> None:
        options = self._options
        mark = "±" if screen.stderr or output.has_character("±") else "+-"
        _print_whole(screen, results_table(results, options.workloads, plus_minus=mark))
        if comparisons:
            _print_whole(screen, comparison_table(comparisons))
        for note in closing_notes(results, self._schedule.skipped, self._cache.describe()):
            screen.print(note)
        if recommendation is not None:
            for part in recommendation_text(recommendation, num_directories=max(options.stripes)):
                screen.print(part)


if __name__ == "__main__":
    sys.exit(main())
