"""Fixtures that give SSDs of tools/ssd_rig.py, or skip with the reason why there are none."""

import functools
from collections.abc import Callable, Iterator

import pytest
import ssd_rig

unavailable_reason = functools.cache(ssd_rig.unavailable_reason)


def ssd_fixture(
    count: int, *, size_bytes: int = 64 << 20, limit_bytes: int = 400 << 20
) -> Callable[..., Iterator[ssd_rig.Rig]]:
    """A module's fixture: `ssds = ssd_fixture(2)`, and a test takes `ssds`, a Rig."""

    @pytest.fixture(scope="module")
    def ssds() -> Iterator[ssd_rig.Rig]:
        reason = unavailable_reason()
        if reason is not None:
            pytest.skip(f"no rig of SSDs: {reason}")
        spec = ssd_rig.Spec(size_bytes=size_bytes, limit_bytes=limit_bytes)
        with ssd_rig.ssd_rig(count, spec) as rig:
            yield rig

    return ssds
