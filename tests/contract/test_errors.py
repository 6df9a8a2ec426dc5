"""Exceptions of ours travel between processes: pickled they are what they were."""

from __future__ import annotations

import copy
import errno
import importlib
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from aio.buffers import SlabFullError
from aio.errors import AioError
from checkpoint.errors import ChangedTensorError, CorruptCheckpointError, RankFailedError
from infinity.autograd.lost_values import RestoreError
from swap.storage.checksums import CorruptSwapError
from swap.tiers import BudgetError

ROOT = Path(__file__).parents[2]
PACKAGES = ("aio", "swap", "checkpoint", "infinity")
DISK = AioError("cannot read", errno=errno.EIO, filename="f", offset=4, nbytes=8, transferred=2)
EXAMPLES: list[BaseException] = [
    DISK,
    CorruptSwapError("not what was written", errno=errno.EIO, filename="f", offset=4, nbytes=8),
    SlabFullError(4, 3, 2),
    BudgetError("too small", least_host_bytes=7),
    CorruptCheckpointError("bad", path="/x", tensor="t", offset=3, nbytes=4),
    ChangedTensorError("w", "change it later"),
    RankFailedError("gone", rank=2),
    RestoreError("not read", DISK, ["w"], ["/x"], lambda: None),
]
"""Of classes that are not made of a text alone."""


def errors_of(package: str) -> Iterator[type[BaseException]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        source = path.read_text()
        if "Error(" in source and path.stem not in ("__main__", "_build"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            module = importlib.import_module(name.removesuffix(".__init__"))
            for value in vars(module).values():
                is_error = isinstance(value, type) and issubclass(value, BaseException)
                if is_error and value.__module__ == module.__name__:
                    yield value


def example(kind: type[BaseException]) -> BaseException:
    return next((error for error in EXAMPLES if type(error) is kind), None) or kind("what")


@pytest.mark.parametrize("package", PACKAGES)
def test_exceptions_survive_pickling_as_they_were(package: str) -> None:
    kinds = list(errors_of(package))
    assert kinds
    for kind in kinds:
        error = example(kind)
        for back in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert (type(back), str(back), repr(back)) == (kind, str(error), repr(error))
            public = {key: value for key, value in vars(error).items() if not key.startswith("_")}
            assert public.items() <= vars(back).items()
            if isinstance(error, OSError) and isinstance(back, OSError):
                assert (back.errno, back.filename) == (error.errno, error.filename)


def test_a_copy_of_a_restore_error_says_where_to_retry() -> None:
    error = RestoreError("not read", DISK, ["w"], ["/x"], lambda: None)
    with pytest.raises(RuntimeError, match="the process that raised the error"):
        pickle.loads(pickle.dumps(error)).retry()
