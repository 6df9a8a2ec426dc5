"""Two network namespaces that are two machines to whoever runs in them: addresses, interfaces and
host names of their own, and a cable between them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

_PROGRAMS = ("ip", "unshare", "hostname")


class NoHostsError(RuntimeError):
    """Namespaces cannot be made here, and why."""


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace; ``interface`` has ``address``."""

    namespace: str
    interface: str
    address: str

    def command(self, words: Sequence[str]) -> list[str]:
        """``words``, to be run on this host, under its name."""
        script = f'hostname {self.namespace} && exec "$@"'
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        return [*inside, "sh", "-c", script, "sh", *words]


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Hosts within the block; raises ``NoHostsError``. Needs root and iproute2."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        raise NoHostsError(f"no {missing[0]}")
    number = os.getpid()
    hosts = [
        Host(f"infinity-{number}-{side}", f"cable{number}{side}"[-15:], f"10.213.0.{last}")
        for side, last in (("a", 1), ("b", 2))
    ]
    with ExitStack() as undo:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            undo.callback(_ip, "netns", "del", host.namespace)
        ends = [host.interface for host in hosts]
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host in hosts:
            _ip("link", "set", host.interface, "netns", host.namespace)
            inside = ("-n", host.namespace)
            _ip(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip(*inside, "link", "set", host.interface, "up")
            _ip(*inside, "link", "set", "lo", "up")
        yield hosts[0], hosts[1]


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoHostsError(f"ip {' '.join(words)}: {done.stderr.strip()}")
