"""Runs transformers' own tests of its Trainer with `OffloadTrainer` in the place of `Trainer`.

    python tools/run_transformers_tests.py CHECKOUT --nvme DIRECTORY [--stand-ins] [--plain]
        [--json results.json] [-k WORD]

CHECKOUT is a copy of the sources of transformers, of the installed version, outside this tree: its
tests are not in the wheel. They run in one process on the CPU, without the network; ``--stand-ins``
writes small models of the names that they ask a hub for into the checkout. They need the package
``parameterized``, which may lie on PYTHONPATH. With ``--plain`` they run with the trainer of
transformers: what fails so fails for reasons of the machine or the version.

Prints each test that does not pass with the reason, why tests were skipped (by themselves: GPUs,
packages that are not installed), and how many passed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

TESTS = ("tests/trainer",)
SEVERAL_PROCESSES = ("tests/trainer/distributed",)
"""Tests that start processes of their own, which would have the trainer in memory."""
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one test. `reason`: the last line of what it failed with, or why it was skipped."""

    name: str
    result: str
    reason: str


def stand_in(nvme: str, host_memory: str) -> None:
    """Put an offloading trainer in the place of `transformers.Trainer`; in the tests' process."""
    from transformers import trainer, trainer_seq2seq

    from infinity.integrations.transformers import OffloadMixin

    class Trainer(OffloadMixin, trainer.Trainer):
        """What tests import as `Trainer`."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            kwargs.setdefault("nvme", nvme)
            kwargs.setdefault("host_memory", host_memory)
            super().__init__(*args, **kwargs)

    class Seq2SeqTrainer(Trainer, trainer_seq2seq.Seq2SeqTrainer):
        """What they import as `Seq2SeqTrainer`."""

    package = sys.modules["transformers"]  # which has put another module in its place by now
    for module in (package, trainer):
        setattr(module, "Trainer", Trainer)  # noqa: B010
    for module in (package, trainer_seq2seq):
        setattr(module, "Seq2SeqTrainer", Seq2SeqTrainer)  # noqa: B010


def run_tests(options: argparse.Namespace) -> list[Outcome]:
    """Runs pytest in the checkout; gives what became of every test."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        plugin = Path(scratch) / "offload_stand_in.py"
        plugin.write_text(
            "from run_transformers_tests import stand_in\n"
            f"stand_in({str(options.nvme)!r}, {options.host_memory!r})\n"
        )
        paths = [str(ROOT), str(ROOT / "tools"), scratch, str(options.checkout)]
        paths += [path for path in [os.environ.get("PYTHONPATH")] if path]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TRANSFORMERS_TEST_DEVICE": "cpu",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["--continue-on-collection-errors", f"--timeout={options.timeout}"]
        command += [f"--junitxml={report}"]
        command += [] if options.plain else ["-p", "offload_stand_in"]
        command += ["-k", options.k] if options.k else []
        command += [*TESTS, *(f"--ignore={folder}" for folder in SEVERAL_PROCESSES)]
        subprocess.run(command, cwd=options.checkout, env=environment, check=False)
        if not report.exists():
            raise SystemExit("pytest did not come to its end; see above")
        return outcomes_in(report.read_text())


def outcomes_in(report: str) -> list[Outcome]:
    """From a report in the format of JUnit."""
    outcomes = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        result, reason = "passed", ""
        for kind in ("failure", "error", "skipped"):
            found = case.find(kind)
            if found is not None:
                result = {"failure": "failed", "error": "failed"}.get(kind, kind)
                reason = _reason_in(found)
        outcomes.append(Outcome(name, result, reason))
    return outcomes


def _reason_in(found: ElementTree.Element) -> str:
    message = (found.get("message") or "").strip()
    if message in ("", "collection failure"):
        told = [line[1:].strip() for line in (found.text or "").splitlines() if line[:1] == "E"]
        message = told[-1] if told else message
    return message.splitlines()[0][:200] if message else ""


def summary_of(outcomes: list[Outcome]) -> str:
    counted = Counter(outcome.result for outcome in outcomes)
    skipped = Counter(outcome.reason for outcome in outcomes if outcome.result == "skipped")
    lines = [f"skipped, {number}: {reason}" for reason, number in skipped.most_common()]
    lines += [f"{o.name}\n    {o.reason}" for o in outcomes if o.result == "failed"]
    counts = ", ".join(f"{counted[name]} {name}" for name in ("passed", "failed", "skipped"))
    return "\n".join([*lines, counts])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path, help="sources of transformers, with tests/trainer")
    parser.add_argument("--nvme", type=Path, required=True, help="a directory for swap files")
    parser.add_argument("--host-memory", default="1GiB", help="the budget of each trainer")
    parser.add_argument("--stand-ins", action="store_true", help="write models that they ask for")
    parser.add_argument("--plain", action="store_true", help="with their own trainer, to compare")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for each test")
    parser.add_argument("--json", type=Path, help="write the outcome of every test here")
    parser.add_argument("-k", default="", help="only tests whose names match, as of pytest")
    options = parser.parse_args()
    if not (options.checkout / "tests" / "trainer").is_dir():
        parser.error(f"{options.checkout} has no tests/trainer; give a copy of the sources")
    if options.stand_ins:
        from transformers_stand_ins import write_stand_ins

        write_stand_ins(options.checkout)
    outcomes = run_tests(options)
    if options.json:
        options.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=2))
    print(summary_of(outcomes))


if __name__ == "__main__":
    main()
