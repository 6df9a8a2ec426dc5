"""Which backend an engine takes, what it says about it, and what it says when it cannot."""

import errno
import logging
import os
from pathlib import Path
from typing import Any, get_args

import pytest

from aio import AioError, Backend, Engine, MemoryBackend, backends
from tests.aio.conftest import descriptors_left, open_descriptors, skip_unless_available

# More events than fs.aio-max-nr has by default, and than this machine has left.
_AIO_MAX = Path("/proc/sys/fs/aio-max-nr")
_TOO_DEEP = 4096


def _lanes_that_do_not_fit() -> int:
    try:
        limit = int(_AIO_MAX.read_text())
    except OSError:
        pytest.skip("needs kernel AIO")
    lanes = limit // _TOO_DEEP + 1
    if lanes > 256:
        pytest.skip(f"fs.aio-max-nr={limit} is too large to be spent here")
    return lanes


def _refuse(monkeypatch: pytest.MonkeyPatch, *refused: str, code: int = errno.EPERM) -> None:
    create = backends._create

    def refusing(name: str, *arguments: Any) -> tuple[Any, int]:
        return (None, code) if name in refused else create(name, *arguments)

    monkeypatch.setattr(backends, "_create", refusing)


class TestAuto:
    def test_first_choice_that_works_is_taken_and_described(self) -> None:
        with Engine(queue_depth=7, lanes=2, block_bytes=8192) as engine:
            description = engine.describe()
        rejected = [name for name, _ in description.rejected]
        assert [*rejected, description.backend] == list(backends._PREFERENCE[: len(rejected) + 1])
        assert (description.lanes, description.queue_depth) == (2, 7)
        assert description.block_bytes == 8192

    def test_nothing_but_posix_works_with_one_warning_that_names_the_cost(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        _refuse(monkeypatch, *backends._PREFERENCE[:-1])
        monkeypatch.setattr("aio.engine._told", set[tuple[str, str]]())
        with Engine() as engine, Engine():  # one for the process, not one for each
            description = engine.describe()
        assert description.backend == "posix"
        assert len(description.rejected) == len(backends._PREFERENCE) - 1
        assert "not libaio: Operation not permitted: this kernel or container does not" in str(
            description
        )
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert "each block takes a thread of its own, which costs processor time" in (
            record.getMessage()
        )

    @pytest.mark.proof
    def test_spent_aio_contexts_fall_back_to_posix(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        """With the kernel's own limit, not a pretended one."""
        monkeypatch.setattr(backends, "_PREFERENCE", ("libaio", "posix"))
        before = open_descriptors()
        lanes = _lanes_that_do_not_fit()
        with Engine(queue_depth=_TOO_DEEP, lanes=lanes) as engine:
            ((name, reason),) = engine.describe().rejected
            with engine.open(tmp_path / "data", "w") as file:
                assert engine.write(file, 0, b"works").result() == 5
        assert name == "libaio"
        assert reason.startswith(
            f"Resource temporarily unavailable: {lanes} lanes of depth {_TOO_DEEP} do not fit under"
            " fs.aio-max-nr ("
        )
        assert reason.endswith("raise it, or use fewer lanes or a smaller queue_depth")
        assert len(caplog.records) == 1
        assert open_descriptors() == before


class TestNamed:
    def test_all_that_the_engine_has_can_be_asked_for(self) -> None:
        assert set(get_args(Backend)) == {"auto", *backends.NAMES}

    @pytest.mark.parametrize("name", backends.NAMES)
    def test_backend_asked_for_is_the_one_taken(self, name: Backend) -> None:
        skip_unless_available(name)
        with Engine(name) as engine:
            assert engine.describe().backend == name
            assert str(engine.describe()).startswith(name)

    def test_libaio_says_how_it_reaches_the_kernel(self) -> None:
        skip_unless_available("libaio")
        with Engine("libaio") as engine:
            assert engine.describe().detail in (
                "libaio.so.1",
                "libaio.so.1t64",
                "raw system calls, libaio.so.1 is not installed",
            )

    def test_backend_that_cannot_start_is_an_error_and_leaves_nothing(self) -> None:
        before = open_descriptors()
        lanes = _lanes_that_do_not_fit()
        with pytest.raises(AioError) as caught:
            Engine("libaio", queue_depth=_TOO_DEEP, lanes=lanes)
        assert caught.value.errno == errno.EAGAIN
        assert str(caught.value).startswith("cannot start an engine with backend libaio: ")
        assert open_descriptors() == before
        with Engine("libaio"):  # what the failed one had taken is free again
            pass

    @pytest.mark.parametrize("left", [0, 1])
    def test_too_many_open_files_are_an_error_and_no_reason_for_a_lesser_backend(
        self, left: int
    ) -> None:
        skip_unless_available("io_uring")
        before = open_descriptors()
        with (
            descriptors_left(left),
            pytest.raises(AioError, match="backend io_uring: Too many open files") as caught,
        ):
            Engine()
        assert caught.value.errno == errno.EMFILE
        assert "RLIMIT_NOFILE" in str(caught.value)
        assert open_descriptors() == before

    def test_unknown_backend_is_refused_with_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match=r"backend='spdk' is not one of auto, .*posix"):
            Engine("spdk")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"queue_depth": 0}, "queue_depth=0 is not between 1 and 4096"),
        ({"queue_depth": 5000}, "queue_depth=5000 is not between 1 and 4096"),
        ({"lanes": 0}, "lanes=0 is not between 1 and 256"),
        ({"block_bytes": 6000}, "block_bytes=6000 is not a multiple of"),
        ({"block_bytes": 0}, "block_bytes=0 is not a multiple of"),
        ({"block_bytes": 2 << 30}, "block_bytes=2147483648 is more than 1073741824"),
        ({"max_pending_bytes": 0}, "max_pending_bytes=0 is not between 1 and"),
    ],
)
def test_sizes_that_cannot_work_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine("posix", **sizes)


def test_block_that_is_no_multiple_of_the_files_alignment_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device with sectors of 64 KiB, which is what the file is made to say."""
    from aio import opening
    from aio.process.descriptors import Descriptor

    path = tmp_path / "data"
    path.touch()
    monkeypatch.setattr(
        opening,
        "_open_direct",
        lambda *_: opening.Direct(Descriptor(path, os.O_RDONLY), 512, 1 << 16, ""),
    )
    before = open_descriptors()
    with (
        Engine("posix", block_bytes=4096) as engine,
        pytest.raises(ValueError, match="block_bytes=4096 is not a multiple of 65536") as caught,
    ):
        engine.open(path)
    assert str(caught.value).endswith(f"the alignment of {path}")
    assert open_descriptors() == before


class TestFaults:
    def test_same_seed_gives_the_same_faults(self, tmp_path: Path) -> None:
        (tmp_path / "data").write_bytes(bytes(1 << 20))

        def outcomes(seed: int) -> list[int]:
            faults = MemoryBackend(seed=seed, error=0.3, errno=errno.EREMOTEIO)
            with (
                Engine(faults, queue_depth=1, block_bytes=4096) as engine,
                engine.open(tmp_path / "data") as file,
            ):
                operations = [engine.read(file, i << 12, bytearray(4096)) for i in range(40)]
                return [_errno_of(operation) for operation in operations]

        assert outcomes(1) == outcomes(1)
        assert outcomes(1) != outcomes(2)
        assert set(outcomes(1)) == {0, errno.EREMOTEIO}

    def test_error_in_the_middle_counts_the_bytes_before_it(self, tmp_path: Path) -> None:
        """Block after block, so that the error cannot overtake."""
        content = os.urandom(1 << 20)
        (tmp_path / "data").write_bytes(content)
        faults = MemoryBackend(seed=5, error=0.05, errno=errno.EIO)
        with (
            Engine(faults, queue_depth=1, block_bytes=4096) as engine,
            engine.open(tmp_path / "data") as file,
        ):
            back = bytearray(1 << 20)
            with pytest.raises(AioError) as caught:
                engine.read(file, 0, back).result()
        moved = caught.value.transferred
        assert 0 < moved < 1 << 20
        assert moved % 4096 == 0
        assert back[:moved] == content[:moved]
        assert str(caught.value) == (
            f"cannot read 1048576 bytes at offset 0 of {tmp_path / 'data'}: Input/output error"
            f" after {moved} bytes"
        )

    def test_medium_that_cannot_be_read_is_not_the_end_of_the_file(self, tmp_path: Path) -> None:
        """Linux says ENODATA for it where direct I/O reads."""
        (tmp_path / "data").write_bytes(bytes(4096))
        with (
            Engine(MemoryBackend(error=1, errno=errno.ENODATA)) as engine,
            engine.open(tmp_path / "data") as file,
            pytest.raises(AioError, match=r": Input/output error$") as caught,
        ):
            engine.read(file, 0, bytearray(4096)).result()
        assert caught.value.errno == errno.EIO

    def test_interruption_that_never_ends_becomes_an_error_after_pauses(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "data").write_bytes(bytes(4096))
        with (
            Engine(MemoryBackend(interrupted=1)) as engine,
            engine.open(tmp_path / "data") as file,
        ):
            operation = engine.read(file, 0, bytearray(4096))
            with pytest.raises(AioError) as caught:
                operation.result()
        assert caught.value.errno == errno.EINTR
        # It paused a millisecond nearly a thousand times.
        assert operation.finished_at - operation.started_at > 0.5

    @pytest.mark.parametrize("field", ["short_transfer", "again", "interrupted", "error"])
    def test_probability_outside_its_range_is_refused(self, field: str) -> None:
        with pytest.raises(ValueError, match=f"{field}=1.5 is not a probability"):
            MemoryBackend(**{field: 1.5})  # type: ignore[arg-type]


def _errno_of(operation: Any) -> int:
    try:
        operation.result()
    except AioError as error:
        return int(error.errno or 0)
    return 0


def test_error_survives_a_trip_to_another_process() -> None:
    import copy

    error = AioError("cannot", errno=5, filename="/x", offset=1, nbytes=2, transferred=1)
    copied = copy.copy(error)
    assert isinstance(copied, OSError)
    assert (str(copied), copied.errno, copied.filename) == ("cannot", 5, "/x")
    assert (copied.offset, copied.nbytes, copied.transferred) == (1, 2, 1)
