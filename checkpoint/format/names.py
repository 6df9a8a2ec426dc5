"""Names of leaves: keys joined by dots, told apart where two leaves would have the same one.

Invariants: names of one tree are unique; none is empty, `__metadata__` or begins with `__pad__`,
which data files keep for themselves; every name is valid UTF-8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Path = tuple[object, ...]
"""Keys and indices from the root to a node."""

PAD_PREFIX = "__pad__"
METADATA_KEY = "__metadata__"
ROOT_NAME = "state"
_ESCAPED = "escaped~"


def natural_name(path: Path) -> str:
    """`("model", "h.0.weight")` gives `model.h.0.weight`; the root itself is called `state`."""
    try:
        name = ".".join(map(str, path)) or ROOT_NAME
    except ValueError:
        name = ".".join(key if isinstance(key, str) else shown(key) for key in path)
    if name.isascii():  # as most are
        return name
    # Half of a surrogate pair is a legal Python string and no legal UTF-8.
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def unique_names(natural: Sequence[str]) -> list[str]:
    """Gives each leaf, in order, its natural name, or that name with `~2`, `~3`, ... if taken.

    A suffixed name is never one that another leaf has by nature. Names that data files reserve
    get a `~` in front first.
    """
    wanted = [_unreserved(name) for name in natural]
    by_nature = set(wanted)
    if len(by_nature) == len(wanted):
        return wanted
    taken: set[str] = set()
    next_suffix: dict[str, int] = {}
    names = []
    for name in wanted:
        unique = name
        while unique in taken or (unique != name and unique in by_nature):
            next_suffix[name] = next_suffix.get(name, 1) + 1
            unique = f"{name}~{next_suffix[name]}"
        taken.add(unique)
        names.append(unique)
    return names


def _unreserved(name: str) -> str:
    is_reserved = name[:2] == "__" and (name == METADATA_KEY or name.startswith(PAD_PREFIX))
    return "~" + name if is_reserved else name


def data_name(name: str) -> str:
    """What an entry with a name by another library is called in data files: by that name, unless
    these keep it for themselves.

    No two entries get the same name, and none of them has to be known for that of another. Names
    that are no valid UTF-8 have one beginning of their own: `~escaped~`.
    """
    if not _is_utf8(name):
        doubled = name.replace("\\", "\\\\")
        return f"~{_ESCAPED}{doubled.encode('utf-8', 'backslashreplace').decode()}"
    bare = name.lstrip("~")
    is_taken = not bare or _unreserved(bare) != bare
    is_taken = is_taken or (bare != name and bare.startswith(_ESCAPED))
    return f"~{name}" if is_taken else name


def _is_utf8(text: str) -> bool:
    """Half of a surrogate pair is a legal Python string and no legal UTF-8."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def render(path: Path, root: str = "state") -> str:
    """`state['trainer']['callbacks'][2]`, as a user would write the access."""
    return root + "".join(f"[{shown(key)}]" for key in path)


def shown(key: object) -> str:
    """A key as Python writes it, and an int of so many digits that it refuses (thousands) in
    hexadecimal ones.
    """
    try:
        return repr(key)
    except ValueError:
        if isinstance(key, tuple):
            items = ", ".join(map(shown, key))
            return f"({items},)" if len(key) == 1 else f"({items})"
        return hex(key) if isinstance(key, int) else object.__repr__(key)


def closest(name: str, names: Iterable[str]) -> list[str]:
    """Names that resemble one that was not found, for error messages."""
    import difflib

    return difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)


def kind_of(value: object) -> str:
    """The full name of a value's type."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
