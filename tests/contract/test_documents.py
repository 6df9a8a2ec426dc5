"""What the documents tell people to run and to open exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
FOLDERS = ("aio", "swap", "checkpoint", "infinity", "tests", "tools", "docs", "examples", ".ci")


def missing_targets(text: str) -> set[str]:
    """Targets that code in `text` asks `make` for and that the Makefile does not have."""
    code = re.findall(r"`[^`\n]+`|^```.*?^```", text, re.MULTILINE | re.DOTALL)
    named = {name for part in code for name in re.findall(r"\bmake ([a-z][a-z-]*)", part)}
    return named - TARGETS


def missing_paths(text: str, folder: Path) -> set[str]:
    """Files of this tree that `text` names in code or links to and that are not there."""
    named = set(re.findall(rf"`((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*)`", text))
    linked = set(re.findall(r"\]\((?!\w+:)([^)#]+)", text))
    return {path for path in named if not (ROOT / path).exists()} | {
        path for path in linked if not (folder / path).exists()
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_document_names_only_targets_and_files_that_exist(document: Path) -> None:
    text = document.read_text()
    assert missing_targets(text) == set()
    assert missing_paths(text, document.parent) == set()


def test_checks_and_all_kinds_of_tests_are_what_ci_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^make ([\w-]+)", script, re.MULTILINE) == [
        "check",
        "test",
        "test-frameworks",
        "proof",
    ]


def test_what_is_missing_in_a_text_is_found() -> None:
    text = "Run `make nothing` or\n```\nmake test\nmake void ARGS=x\n```\nmake sure. `aio/no.py`"
    assert missing_targets(text) == {"nothing", "void"}
    assert missing_paths(f"{text} [a](no.md) [b](https://a.b)", ROOT) == {"aio/no.py", "no.md"}
