"""Gives the parsers of what lies on disks inputs that nobody made for them, and looks what they do.

  python tools/fuzz_parsers.py --seed 0 --minutes 15

Manifests, trees, data files, lists of stripes and their owners, safetensors files and indexes,
states of ranks, snapshots and measurements: each is tried with the inputs kept in
`tests/faults/corpus`, then with changed ones; what leads through lines that none did before is
changed further. Every input loads or raises an error that the parser names as its own, within
bounds of time and memory. Of a process that dies the input is in the file `<target>.current` of
`--folder`; `--replay` tries such a file. Ends with status 1 and a line for each input that did not
hold.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import resource
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, os.fspath(Path(__file__).parents[1]))

from fuzzing.rounds import Rounds, read_corpus, smallest, write_corpus
from fuzzing.targets import TARGETS

CORPUS = Path(__file__).parents[1] / "tests" / "faults" / "corpus"
_ADDRESSES = 4 << 30
"""Bytes of address space beyond those in use: a parser that wants more is refused them."""
_TURN = 50
_SHOWN = 20
_MOST_KEPT_BYTES = 3000


def fuzz(arguments: argparse.Namespace, folder: Path) -> int:
    """Tries inputs in turns until the time is up; gives how many did not hold."""
    names = arguments.targets.split(",")
    corpora = {name: read_corpus(arguments.corpus / f"{name}.jsonl") for name in names}
    rounds = [Rounds(name, arguments.seed, folder, corpora[name]) for name in names]
    faults = [fault for one in rounds for fault in one.replay()]
    end = time.monotonic() + 60 * arguments.minutes
    while time.monotonic() < end:
        for one in rounds:
            for _ in range(_TURN):
                faults += one.next()
                if time.monotonic() > end:
                    break
    for fault in list(dict.fromkeys(faults))[:_SHOWN]:
        print(fault, flush=True)
    for one in rounds:
        print(f"{one.name}: {one.tried} inputs, {len(one.corpus)} kept, {len(one.lines)} lines")
        if arguments.keep:
            new = partial(Rounds, one.name, arguments.seed, Path(tempfile.mkdtemp(dir=folder)), [])
            kept = smallest(new, one.corpus, _MOST_KEPT_BYTES)
            arguments.corpus.mkdir(exist_ok=True)
            write_corpus(arguments.corpus / f"{one.name}.jsonl", kept)
    print(f"{sum(one.tried for one in rounds)} inputs, {len(faults)} of them bad", flush=True)
    return len(faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="another one tries other inputs")
    parser.add_argument("--minutes", type=float, default=1.0, help="0: what is kept, and no more")
    parser.add_argument("--targets", default=",".join(TARGETS), help="such as manifest,tree")
    parser.add_argument(
        "--corpus", type=Path, default=CORPUS, help="folder of inputs to begin with"
    )
    parser.add_argument("--keep", action="store_true", help="write what led somewhere new there")
    parser.add_argument("--folder", type=Path, help="where to; the quickest is in memory")
    parser.add_argument("--replay", type=Path, help="an input; with one target")
    arguments = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESSES, resource.RLIM_INFINITY))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        if arguments.replay:
            given = arguments.replay.read_bytes()
            faults = Rounds(arguments.targets, 0, Path(name), []).attempt(given)[1]
            print(*faults or ["holds"], sep="\n")
            sys.exit(bool(faults))
        sys.exit(fuzz(arguments, Path(name)) > 0)


if __name__ == "__main__":
    main()
