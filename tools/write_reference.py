"""Prints docs/REFERENCE.md: every public name of ``infinity`` and ``checkpoint`` with its arguments
and what its docstring says of it, errors included.

python tools/write_reference.py > docs/REFERENCE.md
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import checkpoint
import infinity

PACKAGES = (infinity, checkpoint)
_HEAD = """\
# Reference

Every public name, as `help()` has it. Written by `tools/write_reference.py` from the docstrings.
"""


def page() -> str:
    return "\n".join([_HEAD, *(line for package in PACKAGES for line in _package(package))])


def public(package: ModuleType) -> list[str]:
    names: list[str] = package.__all__
    return sorted(names, key=str.lower)


def heading(package: ModuleType, name: str) -> str:
    """A name and its arguments, without their types."""
    arguments = _arguments(getattr(package, name))
    title = f"### {package.__name__}.{name}\n"
    return f"{title}\n`{name}{arguments}`\n" if arguments else title


def _package(package: ModuleType) -> Iterator[str]:
    yield f"\n## {package.__name__}\n"
    for name in public(package):
        value = getattr(package, name)
        yield heading(package, name)
        yield _text(value)
        if inspect.isclass(value) and not issubclass(value, BaseException):
            yield from _members(value)


def _members(kind: type) -> Iterator[str]:
    for name, member in vars(kind).items():
        is_shown = not name.startswith("_") and inspect.getdoc(member)
        if is_shown and (inspect.isfunction(member) or isinstance(member, property)):
            yield f"- `{name}{_arguments(member)}`: {' '.join(_text(member).split())}"
    yield ""


def _arguments(value: Any) -> str:
    if not callable(value) or (inspect.isclass(value) and issubclass(value, BaseException)):
        return ""
    parameters = [
        p.replace(annotation=p.empty) for p in inspect.signature(value).parameters.values()
    ]
    shown = str(inspect.Signature([p for p in parameters if p.name != "self"]))
    return re.sub(r"<.*?>", "...", shown)


def _text(value: Any) -> str:
    return (inspect.getdoc(value) or "").replace("``", "`") + "\n"


if __name__ == "__main__":
    print(page(), end="")
