"""Bounds of the time of a training step, on described machines and beside measured steps.

    bound_steps.py --parameters 70e9 --ranks 64 --per-node 16 --node v100
    bound_steps.py --layers 128 --hidden 25600 --ranks 512 --per-node 16 --batch 7 --ssd-read 28e9
    bound_steps.py --compare bench.json [more.json ...]

The first two print what ``infinity.plan`` says that a rank of a transformer keeps and moves, how
long each part of the machine works for that, and the formulas of ZeRO-Infinity and FastPersist.
The last takes what ``bench_offload.py --json`` measured. Rates are bytes or operations a second;
`--json` writes all of it to a file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bounds.nodes import NODES
from bounds.scenario import Outlook, Scenario, look
from bounds.transformer import Transformer, shape_of
from bounds.validation import Comparison, comparisons
from rich.console import Console
from rich.table import Table

from swap.storage.drives.endurance import DRIVE_ENDURANCE
from swap.tiers import format_bytes, parse_bytes

RATES = {
    "flops": "operations a second of a device, as it computes without waiting",
    "ssd_read": "of a node: all its SSDs",
    "ssd_write": "of a node: all its SSDs",
    "ssd_together": "of a node: reads and writes added up",
    "adam": "parameters a second of a node's CPUs",
    "to_device": "of one device",
    "from_device": "of one device",
    "network": "what one rank receives",
}
MEMORY = {"host_memory": "of one rank", "device_memory": "of one rank"}


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table, and write JSON where that is asked for."""
    parser = _arguments()
    options = parser.parse_args(argv)
    try:
        table, result = _compare(options) if options.compare else _look(options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    Console(width=None if Console().is_terminal else 160).print(table)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


def _compare(options: argparse.Namespace) -> tuple[Table, Any]:
    found: list[Comparison] = []
    for path in options.compare:
        found += comparisons(Path(path).stem, json.loads(Path(path).read_text()))
    return _comparison_table(found), [{**asdict(one), "error": one.error} for one in found]


def _look(options: argparse.Namespace) -> tuple[Table, Any]:
    outlook = look(_scenario(options))
    return _outlook_table(outlook), outlook.as_json()


def _scenario(options: argparse.Namespace) -> Scenario:
    layers, hidden = shape_of(options.parameters)
    given = {name: getattr(options, name) for name in RATES}
    for name in MEMORY:
        text = getattr(options, name)
        given[name] = None if text is None else parse_bytes(text, name=name)
    node = NODES[options.node].changed(given)
    return Scenario(
        model=Transformer(
            layers=options.layers or layers,
            hidden=options.hidden or hidden,
            tokens=options.tokens,
            micro_batch=options.batch,
            recomputes=not options.keeps_activations,
        ),
        node=node,
        world_size=options.ranks,
        per_node=options.per_node or min(node.num_devices, options.ranks),
        passes=options.passes,
        activations=options.activations,
        max_parameter_bytes=options.max_parameter_bytes,
        writers=options.writers,
        writer_limit=options.writer_limit,
    )


def _outlook_table(outlook: Outlook) -> Table:
    scenario, model = outlook.scenario, outlook.scenario.model
    nodes = scenario.world_size // scenario.per_node
    table = Table(
        title=f"{model.num_parameters / 1e9:.1f} G parameters ({model.layers} layers, "
        f"{model.hidden} wide) on {scenario.world_size} ranks, {nodes} of {scenario.node.name}",
        show_header=False,
    )
    for name, value in _rows(outlook):
        table.add_row(name, value)
    return table


def _rows(outlook: Outlook) -> Iterator[tuple[str, str]]:
    scenario, step, saving = outlook.scenario, outlook.step, outlook.with_saves
    tokens = scenario.passes * scenario.model.micro_batch * scenario.model.tokens
    yield "tokens a step, each rank", f"{tokens:,.0f}"
    yield "host memory of a rank", format_bytes(outlook.host_bytes)
    yield "NVMe of a rank", f"{format_bytes(outlook.nvme_bytes)}, {outlook.nvme_share:.0%} of state"
    moved = f"{outlook.read_bytes / 1e9:.1f} + {outlook.written_bytes / 1e9:.1f} GB"
    yield "read + written a step, each rank", moved
    for part, seconds in step.seconds.items():
        yield f"{part} alone", f"{seconds:.1f} s"
    yield "step, if all of it overlaps", f"{step.least_seconds:.1f} s, for {step.limit}"
    yield "step, if nothing does", f"{step.most_seconds:.1f} s"
    yield "TFLOP/s a device, at most", f"{outlook.flops_per_device / 1e12:.1f}"
    yield "efficiency, at most", f"{outlook.efficiency:.0%}"
    for name, value in outlook.formula.items():
        yield f"efficiency, formula, {name}", f"{value:.0%}"
    written = scenario.per_node * outlook.written_bytes
    yield "written a day, each node", f"{written * 86400 / step.least_seconds / 1e12:,.0f} TB"
    life = parse_bytes(DRIVE_ENDURANCE, name="endurance") * 8 / written if written else float("inf")
    yield f"steps in the life of 8 drives of {DRIVE_ENDURANCE} a node", f"{life:,.0f}"
    alone = f"{outlook.save_alone_seconds:.1f} s"
    yield "checkpoint", f"{outlook.checkpoint_bytes / 1e12:.2f} TB, {alone} alone"
    longer = f"{saving.least_seconds / step.least_seconds - 1:.1%}"
    yield "one in every step", f"{saving.least_seconds:.1f} s a step at least, {longer} longer"


def _comparison_table(found: Sequence[Comparison]) -> Table:
    table = Table(title="bounds beside measurements")
    headings = "result,budget,measured s,at least s,its error,at most s,limit"
    for heading in (*headings.split(","), "read GB", "planned", "written GB", "planned"):
        left = heading in ("result", "budget", "limit")
        table.add_column(heading, justify="left" if left else "right")
    for entry in found:
        table.add_row(
            entry.name,
            entry.budget,
            f"{entry.measured_seconds:.3f}",
            f"{entry.step.least_seconds:.3f}",
            f"{entry.error:+.1%}",
            f"{entry.step.most_seconds:.3f}",
            entry.step.limit,
            f"{entry.measured_read_bytes / 1e9:.2f}",
            f"{entry.planned_read_bytes / 1e9:.2f}",
            f"{entry.measured_written_bytes / 1e9:.2f}",
            f"{entry.planned_written_bytes / 1e9:.2f}",
        )
    return table


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--compare", nargs="+", metavar="JSON", help="of bench_offload.py")
    parser.add_argument("--parameters", type=float, default=70e9, help="a usual shape of that size")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--batch", type=float, default=1, help="sequences at once on a rank")
    parser.add_argument("--passes", type=int, default=1, help="micro-batches before a step")
    parser.add_argument("--max-parameter-bytes", help="larger matrices are cut into tiles")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--per-node", type=int)
    parser.add_argument("--node", choices=sorted(NODES), default="v100")
    parser.add_argument("--activations", choices=["device", "host", "nvme"], default="host")
    parser.add_argument("--keeps-activations", action="store_true", help="no recomputation")
    parser.add_argument("--writers", type=int, help="of each node, for a checkpoint alone")
    parser.add_argument("--writer-limit", type=float, default=float("inf"), help="of one writer")
    for name, text in {**RATES, **MEMORY}.items():
        kind = str if name in MEMORY else float
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    parser.add_argument("--json")
    return parser


if __name__ == "__main__":
    main()
