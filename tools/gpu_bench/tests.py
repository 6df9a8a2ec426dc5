"""A piece: the tests that need a GPU, and what became of each."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from gpu_bench.context import Context, Record

ROOT = Path(__file__).parents[2]
_SHOWN_CHARACTERS = 4000


def tests(context: Context, record: Record) -> None:
    """``make test-gpu``. Raises ``RuntimeError`` where one failed; the others are noted then."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
        done = subprocess.run(
            [*command, f"--junitxml={report}", "tests/gpu"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.exists():
            raise RuntimeError(f"pytest ended with {done.returncode}: {done.stderr.strip()}")
        record.note(**outcomes(report.read_text()))
    if done.returncode:
        raise RuntimeError(f"tests failed:\n{done.stdout[-_SHOWN_CHARACTERS:]}")


def outcomes(report: str) -> dict[str, object]:
    """Of a report in JUnit's format: how many passed, which failed and why others were skipped."""
    failed: dict[str, str] = {}
    skipped: Counter[str] = Counter()
    passed = 0
    for case in ElementTree.fromstring(report).iter("testcase"):
        told = {child.tag: child for child in case}
        wrong = told.get("failure", told.get("error"))
        if wrong is not None:
            failed[f"{case.get('classname')}::{case.get('name')}"] = wrong.get("message", "")
        elif "skipped" in told:
            skipped[told["skipped"].get("message", "")] += 1
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "skipped": dict(skipped)}
