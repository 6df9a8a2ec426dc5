"""Processes that are forked from one that has imported torch and the library.

That one has computed nothing and has no threads. Importing takes longer than most of what tests
have a process of its own for; torch's compiler comes with the first optimizer of torch.
"""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["infinity", "tests.support.models", "torch._dynamo"])
