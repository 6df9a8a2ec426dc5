"""Runs tests that are coroutines, as those of zarr's conformance suite are; and two stripes."""

import asyncio
import inspect
from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    names = inspect.signature(pyfuncitem.function).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names if name != "self"}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture
def stripes(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / f"ssd{k}" for k in range(2)]
    for folder in folders:
        folder.mkdir()
    return folders
