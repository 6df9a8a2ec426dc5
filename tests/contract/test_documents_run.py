"""The programs and commands in README and docs run as they are written, on folders for SSDs.

A block says what it is: ``python``, ``sh``, or ``text``, ``json``, ``diff``, which nobody runs. One
that cannot run here has a comment before it that says why: ``<!-- not run: needs Slurm -->``.
"""

import argparse
import ast
import contextlib
import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import aio
import checkpoint
import infinity
from checkpoint.bench.conditions.arguments import parse_arguments
from infinity.cli import _arguments
from swap.storage.drives.bandwidth import Bandwidth

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = {"INTEGRATIONS.md": ROOT / "tests" / "integrations" / "test_guides.py"}
"""Documents whose programs another test runs."""
LANGUAGES = {"python", "sh", "text", "json", "diff"}
_BLOCK = re.compile(
    r"(?:<!-- not run: (.+?) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    document: Path
    language: str
    code: str
    not_run: str | None


def blocks_of(document: Path) -> Iterator[Block]:
    for reason, language, code in _BLOCK.findall(document.read_text()):
        yield Block(document, language, code, reason or None)


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]
RUN = [b for b in BLOCKS if b.not_run is None and b.document.name not in ELSEWHERE]
PROGRAMS = [block for block in RUN if block.language == "python"]
COMMANDS = [
    line
    for block in RUN
    if block.language == "sh"
    for line in block.code.replace("\\\n", " ").splitlines()
    if line.strip()
]
INLINE = sorted(
    {
        " ".join(code.split())
        for document in DOCUMENTS
        for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", _BLOCK.sub("", document.read_text()))
    }
)


class Model(nn.Module):
    """As those of Hugging Face, it takes a batch by names and answers with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(loss=x.float().square().mean())


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders in the places where SSDs are mounted, which stand for `/mnt` and have their speed."""
    for name in ("nvme0", "nvme1", "a", "b", "c", "d"):
        (tmp_path / "mnt" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("infinity.planning.plan.measure", lambda _: Bandwidth(1e9, 1e9))
    return tmp_path / "mnt"


def at(disks: Path, text: str) -> str:
    return text.replace("/mnt/", f"{disks}/")


def test_blocks_say_what_they_are_and_why_they_are_not_run() -> None:
    assert len(PROGRAMS) >= 4
    assert len(COMMANDS) >= 6
    assert {block.language for block in BLOCKS} == LANGUAGES
    for name, test in ELSEWHERE.items():
        assert name in test.read_text()
    for document in DOCUMENTS:
        num_fences = len(re.findall(r"^```", document.read_text(), re.MULTILINE))
        assert num_fences == 2 * len(list(blocks_of(document))), document
    for block in BLOCKS:
        for path in re.findall(r"\btests/[\w/]+\.py", block.not_run or ""):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("document", sorted({b.document for b in PROGRAMS}), ids=lambda p: p.name)
def test_programs_of_a_document_run_one_after_the_other(document: Path, disks: Path) -> None:
    with contextlib.ExitStack() as stack:
        known: dict[str, Any] = {
            "model": Model(),
            "loader": [{"x": torch.randn(2, 64, dtype=torch.bfloat16)}],
        }
        for block in (b for b in PROGRAMS if b.document == document):
            if "offloaded." in block.code and "as offloaded" not in block.code:
                offload = infinity.offload(Model(), disks / "nvme0", host_memory="1GiB")
                known["offloaded"] = stack.enter_context(offload)
            exec(compile(at(disks, block.code), str(document), "exec"), known)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command: str, disks: Path) -> None:
    """Each is run by the tests of its program; here its words are what counts."""
    save_file({"w": torch.zeros(2**16)}, disks.parent / "model.safetensors")
    name, *words = shlex.split(at(disks, command).replace("4GiB", "1MiB"), comments=True)
    assert name in {"ckpt-bench", "infinity"}
    if name == "ckpt-bench":
        assert parse_arguments([*words, "--backend", "posix"]).directories
    else:
        assert _arguments().parse_args(words).command == words[0]


@pytest.mark.parametrize("code", [c for c in INLINE if re.match(r"(infinity|ckpt-bench) ", c)])
def test_commands_within_sentences_have_options_that_exist(code: str) -> None:
    name, *words = shlex.split(code)
    options = {word for word in words if word.startswith("--")}
    parser = _arguments()
    if name == "infinity" and words[0].islower():
        parsers = {
            key: parser
            for action in parser._actions
            if isinstance(action, argparse._SubParsersAction)
            for key, parser in action.choices.items()
        }
        assert words[0] in {*parsers, "--help", "--version"}
        if words[0] in parsers:
            assert options <= {*parsers[words[0]]._option_string_actions}


def calls_in(code: str) -> Iterator[ast.Call]:
    """Calls of ours by their full names."""
    with contextlib.suppress(SyntaxError):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(_OURS):
                yield node


_OURS = ("infinity.", "checkpoint.", "aio.")
CALLED = [(code, call) for code in INLINE for call in calls_in(code)]


@pytest.mark.parametrize(("code", "call"), CALLED, ids=[code for code, _ in CALLED])
def test_calls_within_sentences_have_arguments_that_exist(code: str, call: ast.Call) -> None:
    """`...` stands for arguments that are not shown."""
    package, *path = ast.unparse(call.func).split(".")
    called: Any = {"aio": aio, "checkpoint": checkpoint, "infinity": infinity}[package]
    for name in path:
        called = getattr(called, name)
    shown = [a for a in call.args if not (isinstance(a, ast.Constant) and a.value is ...)]
    named = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    inspect.signature(called).bind_partial(*shown, **named)
