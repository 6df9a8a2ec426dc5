"""What a step of training takes: replayed in simulated time, and beside measurements.

    simulate.py --parameters 70e9 --ranks 64 --per-node 16 --node v100
    simulate.py --layers 128 --hidden 25600 --ranks 512 --per-node 16 --batch 7 --ssd-read 28e9
    simulate.py --validate bench.json [more.json ...]

The first two make up a transformer and print what a rank keeps, moves and waits for, beside the
bandwidth model of ZeRO-Infinity and the writer scaling of FastPersist. The last predicts the runs
that `bench_offload.py --json` measured. Rates are bytes or operations a second; `--json` writes all
of it to a file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from simulator.nodes import NODES
from simulator.rates import UNLIMITED
from simulator.scenario import Outlook, Scenario, look
from simulator.transformer import Transformer, shape_of
from simulator.validation import Prediction, predictions

from swap.storage.endurance import DRIVE_ENDURANCE
from swap.tiers import Tier, format_bytes, parse_bytes

RATES = {
    "flops": "operations a second of a device, as it computes without waiting",
    "ssd_read": "of a node: all its SSDs",
    "ssd_write": "of a node: all its SSDs",
    "ssd_together": "of a node: reads and writes added up",
    "adam": "parameters a second of a node's CPUs",
    "to_device": "of one device",
    "from_device": "of one device",
    "network": "what one rank receives",
    "network_latency_seconds": "of a transfer between all ranks",
}
MEMORY = {"host_memory": "of one rank", "device_memory": "of one rank"}


def main(argv: Sequence[str] | None = None) -> None:
    """Print tables, and write JSON where that is asked for."""
    parser = _arguments()
    options = parser.parse_args(argv)
    try:
        tables, result = _validate(options) if options.validate else _look(options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    console = Console(width=None if Console().is_terminal else 160)
    for table in tables:
        console.print(table)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


def _validate(options: argparse.Namespace) -> tuple[list[Table], Any]:
    found: list[Prediction] = []
    for path in options.validate:
        found += predictions(Path(path).stem, json.loads(Path(path).read_text()))
    return [_validation_table(found)], [_as_json(prediction) for prediction in found]


def _look(options: argparse.Namespace) -> tuple[list[Table], Any]:
    outlook = look(_scenario(options))
    return [_outlook_table(outlook)], outlook.as_json()


def _scenario(options: argparse.Namespace) -> Scenario:
    layers, hidden = shape_of(options.parameters)
    given = {name: getattr(options, name) for name in RATES}
    for name in MEMORY:
        text = getattr(options, name)
        given[name] = None if text is None else parse_bytes(text, name=name)
    node = NODES[options.node].changed(given)
    tile = options.max_parameter_bytes
    return Scenario(
        model=Transformer(
            layers=options.layers or layers,
            hidden=options.hidden or hidden,
            tokens=options.tokens,
            micro_batch=options.batch,
            recomputes=not options.keeps_activations,
            max_parameter_bytes=None if tile is None else parse_bytes(tile, name="max_parameter"),
        ),
        node=node,
        world_size=options.ranks,
        per_node=options.per_node or min(node.num_devices, options.ranks),
        passes=options.passes,
        activations=Tier[options.activations.upper()],
        saves=options.saves,
        writers=options.writers,
        writer_limit=options.writer_limit,
        steps=options.steps,
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
    scenario, times, formula = outlook.scenario, outlook.times, outlook.formula
    tokens = scenario.passes * scenario.model.micro_batch * scenario.model.tokens
    yield "tokens a step, each rank", f"{tokens:,.0f}"
    yield "parameters kept by a rank", f"{outlook.kept_parameters / 1e6:,.1f} M"
    yield "subgroups of a rank", f"{outlook.num_subgroups:,}"
    yield "host memory of a rank", format_bytes(outlook.host_bytes)
    yield "NVMe of a rank", f"{format_bytes(outlook.nvme_bytes)}, {outlook.nvme_share:.0%} of state"
    moved = f"{times.read_bytes / 1e9:.1f} + {times.written_bytes / 1e9:.1f} GB"
    yield "read + written a step, each rank", moved
    yield "computing alone", f"{outlook.least_compute_seconds:.1f} s"
    yield "step, replayed", f"{times.step_seconds:.1f} s"
    yield "of it waiting for weights", f"{times.stall_seconds:.1f} s"
    yield "of it with the SSDs at work", f"{times.disk_seconds:.1f} s"
    yield "of it with the kernel at work", f"{times.kernel_seconds:.1f} s"
    yield "TFLOP/s a device, replayed", f"{outlook.flops_per_device / 1e12:.1f}"
    yield "efficiency, replayed", f"{outlook.efficiency:.0%}"
    for name, value in formula.items():
        yield f"efficiency, formula, {name}", f"{value:.0%}"
    steps = scenario.per_node * times.written_bytes
    yield "written a day, each node", f"{steps * 86400 / times.step_seconds / 1e12:,.0f} TB"
    writing = parse_bytes(DRIVE_ENDURANCE, name="endurance")
    life = writing / (steps / 8) if steps else float("inf")
    yield f"steps in the life of 8 drives of {DRIVE_ENDURANCE} a node", f"{life:,.0f}"
    alone = f"{outlook.save_alone_seconds:.1f} s"
    yield "checkpoint", f"{outlook.checkpoint_bytes / 1e12:.2f} TB, {alone} alone"
    if outlook.times_with_saves is not None:
        longer = outlook.times_with_saves.step_seconds / times.step_seconds - 1
        yield "one at every step, durable after", f"{outlook.times_with_saves.save_seconds:.1f} s"
        yield "and steps longer by", f"{longer:.1%}"


def _validation_table(found: Sequence[Prediction]) -> Table:
    table = Table(title="predicted beside measured")
    headings = "result,budget,measured s,predicted s,error,larger of both s,its error"
    for heading in (*headings.split(","), "read GB", "predicted", "written GB", "predicted"):
        table.add_column(heading, justify="left" if heading in ("result", "budget") else "right")
    for entry in found:
        table.add_row(
            entry.name,
            entry.budget,
            f"{entry.measured_seconds:.3f}",
            f"{entry.predicted.step_seconds:.3f}",
            f"{entry.error:+.1%}",
            f"{entry.bound_seconds:.3f}",
            f"{entry.bound_error:+.1%}",
            f"{entry.measured_read_bytes / 1e9:.2f}",
            f"{entry.predicted.read_bytes / 1e9:.2f}",
            f"{entry.measured_written_bytes / 1e9:.2f}",
            f"{entry.predicted.written_bytes / 1e9:.2f}",
        )
    return table


def _as_json(prediction: Prediction) -> dict[str, Any]:
    errors = {"error": prediction.error, "bound_error": prediction.bound_error}
    return {**asdict(prediction), **errors}


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--validate", nargs="+", metavar="JSON", help="of bench_offload.py")
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
    parser.add_argument("--saves", action="store_true", help="a checkpoint at every step, too")
    parser.add_argument("--writers", type=int, help="of each node, for a checkpoint alone")
    parser.add_argument("--writer-limit", type=float, default=UNLIMITED, help="of one writer")
    parser.add_argument("--steps", type=int, default=2, help="steps that are averaged")
    for name, text in {**RATES, **MEMORY}.items():
        kind = str if name in MEMORY else float
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    parser.add_argument("--json")
    return parser


if __name__ == "__main__":
    main()
