"""A system that ``bench_gpu`` compares, in a process of its own that does what it is asked.

``python gpu_systems.py JOB`` sets the system of a job (JSON, see ``gpu_bench.jobs``) up. Every line
of input is a ``Request`` (JSON) and is answered by a line of JSON; the process ends when its input
does.
"""

from __future__ import annotations

import json
import sys

from gpu_bench.jobs import Job
from gpu_bench.systems import Request, opened


def main() -> None:
    """Answer each line of the input."""
    with opened(Job(**json.loads(sys.argv[1]))) as system:
        for line in sys.stdin:
            print(json.dumps(system.answer(Request(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
