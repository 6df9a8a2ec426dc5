"""What a program's logging handlers do wrong stops no operation."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from aio import Engine, MemoryBackend
from tests.aio.conftest import Gate, random_bytes

SECONDS = 20  # far more than any operation here takes


class _Unreachable(logging.Handler):
    """A handler whose server is gone."""

    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError(f"cannot deliver {record.getMessage()}")


@pytest.fixture
def undelivered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Makes every log record of aio fail; what the threads told of that."""
    told: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda event: told.append(str(event.exc_value)))
    handler = _Unreachable()
    logging.getLogger("aio").addHandler(handler)
    yield told
    logging.getLogger("aio").removeHandler(handler)


def test_handler_that_raises_at_refused_direct_io_stops_no_operation(
    tmp_path: Path, undelivered: list[str]
) -> None:
    data = random_bytes(1 << 20)
    with (
        Engine(MemoryBackend(refuse_direct=True)) as engine,
        engine.open(tmp_path / "x", "w") as file,
    ):
        assert engine.write(file, 0, data).result(SECONDS) == len(data)
        assert engine.write(file, 0, data).result(SECONDS) == len(data)
        reason = file.direct_reason
    if not reason.startswith("the kernel refused"):
        pytest.skip(f"needs a file system with direct I/O: {reason}")
    assert [message for message in undelivered if "the kernel refused" in message]


def test_handler_that_raises_at_a_failed_callback_stops_no_operation(
    tmp_path: Path, gated: Engine, gate: Gate, undelivered: list[str]
) -> None:
    with gated.open(tmp_path / "x", "w") as file:
        operations = [gated.write(file, 0, b"a"), gated.write(file, 1, b"b")]
        for operation in operations:
            operation.add_done_callback(lambda _: 1 / 0)
        gate.open()
        assert [operation.result(SECONDS) for operation in operations] == [1, 1]
    assert [message for message in undelivered if "a callback of the write" in message]


def test_file_that_cannot_be_closed_leaves_its_last_operation_its_outcome(
    tmp_path: Path,
    gated: Engine,
    gate: Gate,
    undelivered: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = gated.open(tmp_path / "x", "w")
    operation = gated.write(file, 0, b"a")

    def fail() -> None:
        raise OSError("quota")

    closing = threading.Thread(target=file.close)
    with monkeypatch.context() as patch:
        patch.setattr(file, "close_descriptors", fail)
        closing.start()
        while not file.is_closed:
            pass
        gate.open()
        assert operation.result(SECONDS) == 1
        closing.join(SECONDS)
        assert not closing.is_alive()
        gated.close()
    file.close()
    assert [message for message in undelivered if "quota" in message]
