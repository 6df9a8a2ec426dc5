"""Bytes at device speed: aligned buffers, files, submission queues. Knows nothing of tensors.

with Engine() as engine, engine.open("/mnt/nvme0/data.bin", "w") as file:
    engine.write(file, 0, buffer).result()
    file.sync()
"""

from aio.backends import Backend, MemoryBackend
from aio.buffers import Slab, SlabFullError
from aio.engine import Engine, EngineDescription
from aio.errors import AioError, NotRegularFileError, naming
from aio.files import File, sync_directory
from aio.opening import open_regular_file, read_regular_file
from aio.operation import Operation, Request
from aio.ranges import RangeAllocator

__all__ = [
    "AioError",
    "Backend",
    "Engine",
    "EngineDescription",
    "File",
    "MemoryBackend",
    "NotRegularFileError",
    "Operation",
    "RangeAllocator",
    "Request",
    "Slab",
    "SlabFullError",
    "naming",
    "open_regular_file",
    "read_regular_file",
    "sync_directory",
]
