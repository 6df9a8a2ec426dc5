"""The pages that programs write: the reference and the sizing table are those of this tree."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import write_reference
import write_sizing

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = (DOCS / "REFERENCE.md").read_text()


@pytest.mark.parametrize("package", write_reference.PACKAGES, ids=lambda package: package.__name__)
def test_reference_has_every_public_name_with_its_arguments_and_no_other(
    package: ModuleType,
) -> None:
    """After a change: `python tools/write_reference.py > docs/REFERENCE.md`."""
    names = write_reference.public(package)
    titles = re.findall(rf"^### {package.__name__}\.(\w+)$", REFERENCE, re.MULTILINE)
    assert titles == names
    assert [name for name in names if write_reference.heading(package, name) not in REFERENCE] == []


def test_public_names_say_what_they_are() -> None:
    for package in write_reference.PACKAGES:
        for name in write_reference.public(package):
            assert getattr(package, name).__doc__, name


def test_rows_of_sizing_are_what_plan_says() -> None:
    """After a change: `python tools/write_sizing.py > docs/SIZING.md`."""
    sizing = (DOCS / "SIZING.md").read_text()
    for memory in (None, write_sizing.MEMORIES[-1]):
        assert write_sizing.row(write_sizing.BILLIONS[0], memory) in sizing


@pytest.mark.proof
def test_sizing_is_what_plan_says() -> None:
    assert (DOCS / "SIZING.md").read_text() == write_sizing.page()
