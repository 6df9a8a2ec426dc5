"""What every backend keeps: bytes, lengths, errors, order of nothing and loss of nothing."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from aio import AioError, Engine, Operation, Request, Slab
from tests.aio.conftest import Bytes, random_bytes

MIB = 1 << 20
SIZES = [0, 1, 511, 512, 513, 4095, 4096, 4097, 65536, 65537, MIB - 1, MIB, MIB + 1, 3 * MIB + 777]
OFFSETS = [0, 1, 511, 512, 4095, 4096, 4097, 65536, MIB + 3]
# Distances of a buffer from a page boundary.
ADDRESSES = [0, 1, 16, 511, 512, 2048]


@pytest.fixture(scope="module")
def slab() -> Slab:
    return Slab(16 * MIB)


def placed(slab: Slab, content: Bytes, distance: int) -> Bytes:
    """A copy of `content` at so many bytes from a page boundary."""
    place = slab.allocate(len(content) + distance + 1)[distance : distance + len(content)]
    place[:] = content
    return place


class TestTransfers:
    @pytest.mark.parametrize("size", SIZES)
    def test_write_then_read_of_any_size_gives_the_bytes_back(
        self, engine: Engine, tmp_path: Path, slab: Slab, size: int
    ) -> None:
        content = placed(slab, random_bytes(size), 0)
        with engine.open(tmp_path / "data.bin", "w") as file:
            assert engine.write(file, 0, content).result() == size
            assert file.size() == size
            back = slab.allocate(size)
            assert engine.read(file, 0, back).result() == size
        assert np.array_equal(back, content)
        assert (tmp_path / "data.bin").read_bytes() == content.tobytes()

    @pytest.mark.parametrize("offset", OFFSETS)
    def test_write_at_any_offset_changes_these_bytes_only(
        self, engine: Engine, make_file: Callable[..., Path], offset: int
    ) -> None:
        before = random_bytes(3 * MIB, seed=1)
        path = make_file(before)
        content = random_bytes(MIB + 5, seed=2)
        with engine.open(path, "r+") as file:
            engine.write(file, offset, content).result()
            back = np.empty_like(content)
            engine.read(file, offset, back).result()
        expected = before.copy()
        expected[offset : offset + len(content)] = content
        assert np.array_equal(back, content)
        assert np.array_equal(np.fromfile(path, np.uint8), expected)

    @pytest.mark.parametrize("distance", ADDRESSES)
    def test_buffer_at_any_address_is_written_and_read(
        self, engine: Engine, tmp_path: Path, slab: Slab, distance: int
    ) -> None:
        content = placed(slab, random_bytes(2 * MIB + 100), distance)
        back = placed(slab, np.zeros(len(content), np.uint8), distance)
        with engine.open(tmp_path / "data.bin", "w") as file:
            engine.write(file, 0, content).result()
            engine.read(file, 0, back).result()
        assert np.array_equal(back, content)

    def test_read_leaves_the_bytes_around_the_buffer_alone(
        self, engine: Engine, make_file: Callable[..., Path]
    ) -> None:
        content = random_bytes(3 * MIB)
        memory = np.full(2 * MIB, 0xA5, np.uint8)
        with engine.open(make_file(content)) as file:
            engine.read(file, 7, memory[1000:-1000]).result()
        assert np.array_equal(memory[1000:-1000], content[7 : 7 + len(memory) - 2000])
        assert (memory[:1000] == 0xA5).all()
        assert (memory[-1000:] == 0xA5).all()

    def test_write_beyond_the_end_leaves_zeros_between(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        with engine.open(tmp_path / "data.bin", "w") as file:
            engine.write(file, 100_000, b"end").result()
            assert file.size() == 100_003
        assert (tmp_path / "data.bin").read_bytes() == bytes(100_000) + b"end"

    @pytest.mark.parametrize("seed", range(3))
    def test_adjacent_unaligned_writes_in_flight_together_lose_no_byte(
        self, engine: Engine, make_file: Callable[..., Path], seed: int
    ) -> None:
        """Neighbours share pages: half of one in one request, half in the next."""
        rng = np.random.default_rng(seed)
        path = make_file(6 * MIB)
        np.fromfile(path, np.uint8)  # large folios in the page cache, as another reader leaves
        content = random_bytes(6 * MIB, seed=seed + 10)
        cuts = np.unique(rng.integers(0, len(content), 300)).tolist()
        with engine.open(path, "r+") as file:
            spans = list(zip([0, *cuts], [*cuts, len(content)], strict=True))
            rng.shuffle(spans)
            requests = [Request("write", file, a, content[a:b]) for a, b in spans]
            for operation in engine.submit(requests):
                operation.result()
            back = np.empty_like(content)
            engine.read(file, 0, back).result()
            file.sync()
        assert np.array_equal(back, content)
        assert np.array_equal(np.fromfile(path, np.uint8), content)

    def test_unaligned_write_is_seen_by_the_next_aligned_read_and_the_other_way_round(
        self, engine: Engine, make_file: Callable[..., Path]
    ) -> None:
        expected = random_bytes(MIB)
        rng = np.random.default_rng(3)
        with engine.open(make_file(expected.copy()), "r+") as file:
            for step in range(60):
                begin, end = sorted(rng.integers(0, MIB, 2).tolist())
                if step % 3 == 0:
                    begin, end = begin // 4096 * 4096, end // 4096 * 4096
                expected[begin:end] = random_bytes(end - begin, seed=step)
                engine.write(file, begin, expected[begin:end].copy()).result()
                begin, end = sorted(rng.integers(0, MIB, 2).tolist())
                back = np.empty(end - begin, np.uint8)
                engine.read(file, begin, back).result()
                assert np.array_equal(back, expected[begin:end])

    def test_many_operations_over_files_lanes_and_threads_all_arrive(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        num_files, num_pieces, piece = 4, 40, 30_011
        contents = [random_bytes(num_pieces * piece, seed=i) for i in range(num_files)]
        failures: list[BaseException] = []

        def write_file(index: int) -> None:
            try:
                with engine.open(tmp_path / str(index), "w", size=num_pieces * piece) as file:
                    operations = [
                        engine.write(
                            file,
                            i * piece,
                            contents[index][i * piece : (i + 1) * piece],
                            lane=None if i % 3 else i % engine.lanes,
                        )
                        for i in range(num_pieces)
                    ]
                    assert sum(op.result() for op in operations) == num_pieces * piece
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=write_file, args=(i,)) for i in range(num_files)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        for index, content in enumerate(contents):
            assert (tmp_path / str(index)).read_bytes() == content.tobytes()

    def test_batch_of_reads_and_writes_returns_operations_in_order(
        self, engine: Engine, make_file: Callable[..., Path], tmp_path: Path
    ) -> None:
        content = random_bytes(MIB)
        with (
            engine.open(make_file(content)) as source,
            engine.open(tmp_path / "out", "x") as sink,
        ):
            half = np.empty(MIB // 2, np.uint8)
            requests = [
                Request("read", source, MIB // 2, half),
                Request("write", sink, 0, content[: MIB // 2]),
                Request("read", source, 0, bytearray(0)),
            ]
            operations = engine.submit(requests, lane=1)
            assert [op.request for op in operations] == requests
            assert [op.result() for op in operations] == [MIB // 2, MIB // 2, 0]
        assert np.array_equal(half, content[MIB // 2 :])
        assert (tmp_path / "out").read_bytes() == content[: MIB // 2].tobytes()

    def test_empty_batch_returns_no_operations(self, engine: Engine) -> None:
        assert engine.submit([]) == []

    @pytest.mark.parametrize("make", [bytearray, lambda n: memoryview(bytearray(n)), np.zeros])
    def test_any_contiguous_buffer_can_be_read_into_and_written(
        self, engine: Engine, make_file: Callable[..., Path], make: Callable[[int], Bytes]
    ) -> None:
        buffer = make(1000)
        nbytes = len(bytes(buffer))
        content = random_bytes(20_000)
        with engine.open(make_file(content), "r+") as file:
            assert engine.read(file, 100, buffer).result() == nbytes
            assert bytes(buffer) == content[100 : 100 + nbytes].tobytes()
            assert engine.write(file, 5, buffer).result() == nbytes
            back = bytearray(nbytes)
            engine.read(file, 5, back).result()
        assert back == content[100 : 100 + nbytes].tobytes()


class TestLimits:
    def test_requests_above_the_pending_limit_wait_and_are_all_done(
        self, backend: object, tmp_path: Path
    ) -> None:
        content = random_bytes(8 * MIB)
        with (
            Engine(backend, 4, 1 << 16, max_pending_bytes=MIB) as small,  # type: ignore[arg-type]
            small.open(tmp_path / "data.bin", "w") as file,
        ):
            pieces = [
                Request("write", file, i, content[i : i + 300_000])
                for i in range(0, len(content), 300_000)
            ]
            for operation in small.submit(pieces):
                operation.result()
            # One request that is larger than the limit goes alone.
            assert small.write(file, 0, content).result() == len(content)
        assert (tmp_path / "data.bin").read_bytes() == content.tobytes()

    @pytest.mark.parametrize("depth", [1, 2, 300])
    def test_any_queue_depth_moves_the_same_bytes(
        self, backend: object, tmp_path: Path, depth: int
    ) -> None:
        content = random_bytes(2 * MIB + 1)
        with (
            Engine(backend, depth, 4096) as made,  # type: ignore[arg-type]
            made.open(tmp_path / "data.bin", "w") as file,
        ):
            made.write(file, 0, content).result()
        assert (tmp_path / "data.bin").read_bytes() == content.tobytes()


class TestErrors:
    @pytest.mark.parametrize("size", [0, 1, 4096, 5000, 70_000, MIB])
    def test_read_beyond_the_end_says_how_many_bytes_there_were(
        self, engine: Engine, make_file: Callable[..., Path], size: int
    ) -> None:
        content = random_bytes(size)
        path = make_file(content)
        buffer = np.zeros(size + 9000, np.uint8)
        with engine.open(path) as file, pytest.raises(AioError) as caught:
            engine.read(file, 0, buffer).result()
        error = caught.value
        assert (error.errno, error.filename) == (errno.ENODATA, str(path))
        assert (error.offset, error.nbytes) == (0, size + 9000)
        assert 0 <= error.transferred <= size
        assert np.array_equal(buffer[: error.transferred], content[: error.transferred])

    def test_read_that_starts_beyond_the_end_fails_with_nothing_moved(
        self, engine: Engine, make_file: Callable[..., Path]
    ) -> None:
        with engine.open(make_file(100)) as file, pytest.raises(AioError) as caught:
            engine.read(file, 1 << 40, bytearray(10)).result()
        assert (caught.value.errno, caught.value.transferred) == (errno.ENODATA, 0)

    def test_failed_operation_leaves_the_engine_and_the_file_usable(
        self, engine: Engine, make_file: Callable[..., Path]
    ) -> None:
        content = random_bytes(10_000)
        buffer = bytearray(10_000)
        with engine.open(make_file(content)) as file:
            failing = engine.submit([Request("read", file, 9_000, bytearray(9_000))] * 20)
            working = engine.read(file, 0, buffer)
            for operation in failing:
                with pytest.raises(AioError):
                    operation.result()
                with pytest.raises(AioError):  # asked again, it fails again
                    operation.result()
            assert working.result() == 10_000
        assert buffer == content.tobytes()

    def test_unreadable_memory_is_an_error_and_not_a_crash(
        self, engine: Engine, make_file: Callable[..., Path]
    ) -> None:
        """A buffer whose pages are gone: what a broken extension might hand over."""
        import mmap

        content = random_bytes(1 << 16)
        path = make_file(content)
        empty = make_file(0, name="empty")
        with path.open("r+b") as handle, mmap.mmap(handle.fileno(), 0) as mapped:
            handle.truncate(0)  # the mapping stays, its pages do not
            with engine.open(empty, "r+") as file, pytest.raises(AioError) as caught:
                engine.write(file, 0, mapped).result()
        assert caught.value.errno == errno.EFAULT


class TestOperations:
    def test_callbacks_run_once_each_before_and_after_the_end(
        self, engine: Engine, make_file: Callable[..., Path]
    ) -> None:
        seen: list[Operation] = []
        both = threading.Semaphore(0)

        def note(operation: Operation) -> None:
            seen.append(operation)
            both.release()

        with engine.open(make_file(5000)) as file:
            operation = engine.read(file, 0, bytearray(5000))
            operation.add_done_callback(note)
            operation.result()
            assert both.acquire(timeout=60)
            operation.add_done_callback(note)
        assert seen == [operation, operation]

    def test_times_lie_between_submission_and_result(
        self, engine: Engine, make_file: Callable[..., Path]
    ) -> None:
        import time

        with engine.open(make_file(MIB)) as file:
            before = time.perf_counter()
            operation = engine.read(file, 0, bytearray(MIB))
            operation.result()
            after = time.perf_counter()
        assert before <= operation.started_at <= operation.finished_at <= after
