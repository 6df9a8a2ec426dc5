"""What a snapshot says of itself is checked before anybody counts or sorts by it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import checkpoint
from infinity.snapshots.entries import Point, listed, read_point

POINT = Point(name="a", number=1, model="m", time_ns=1, step=2, kept_bytes=3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("time_ns", [1]), ("time_ns", 1 << 63), ("number", "1"), ("number", True)),
        *(("step", -1), ("kept_bytes", 1.5), ("model", 7), ("name", 7)),
    ],
)
def test_point_that_says_what_none_does_is_refused_and_left_out_of_the_list(
    key: str, value: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save({"point": POINT.to_tree()}, tmp_path / "a")
    assert [snapshot.name for snapshot in listed(tmp_path)] == ["a"]
    checkpoint.save({"point": POINT.to_tree() | {key: value}}, tmp_path / "a")
    with pytest.raises(ValueError, match="another version of this library"):
        read_point(tmp_path / "a")
    with caplog.at_level(logging.WARNING):
        assert listed(tmp_path) == []
    assert "the snapshot a cannot be read" in caplog.text
