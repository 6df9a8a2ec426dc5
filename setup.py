"""The native modules of the distribution; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
BUILDERS = [
    f"{package}/_build.py:ffibuilder"
    for package in ("aio", "swap", "checkpoint")
    if (ROOT / package / "_build.py").exists()
]

setup(
    cffi_modules=BUILDERS,
    # The modules keep to the stable ABI, so that one wheel serves every Python from 3.11 on.
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if BUILDERS else {},
)
