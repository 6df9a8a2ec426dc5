"""Figures from samples: medians, shares of the limit, ratios, the recommended setting."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from checkpoint.bench.conditions.settings import Setting
from checkpoint.bench.conditions.workload import equal_workload
from checkpoint.bench.measure.comparisons import Comparison, compare
from checkpoint.bench.measure.measuring import Row, Sample
from checkpoint.bench.measure.results import (
    DIRECTIONS,
    Results,
    Spread,
    recommend,
    spread,
    summarize,
)
from checkpoint.bench.measure.schedule import Contestant, Role
from checkpoint.bench.output.plot import draw
from checkpoint.bench.output.report import to_json
from checkpoint.bench.output.table import (
    closing_notes,
    comparison_table,
    recommendation_text,
    results_table,
)
from checkpoint.bench.systems.fio import Fio
from checkpoint.bench.systems.peers import TorchSave
from checkpoint.bench.systems.raw import Raw
from checkpoint.bench.systems.system import Infinity, System

A, B = Path("/ssd/a"), Path("/ssd/b")
GB = 10**9
WORKLOADS = [equal_workload(GB, 4096), equal_workload(GB, GB)]


def row(
    role: Role,
    seconds: Sequence[tuple[float, float]],
    *,
    directories: tuple[Path, ...] = (A,),
    setting: Setting | None = None,
    workload: int = 0,
    system: System | None = None,
) -> Row:
    """A row that moved a GB in each run: seconds until durable, seconds to load."""
    made: dict[str, System] = {
        "limit": Raw(Setting()),
        "raw": Raw(Setting()),
        "infinity": Infinity(Setting(), verify=True, live=True),
        "peer": TorchSave(),
    }
    contestant = Contestant(role, system or made[role], directories, workload, setting)
    samples = [Sample(GB, save / 2, save, GB, load) for save, load in seconds]
    return Row(contestant, samples)


def summary(*rows: Row) -> Results:
    return summarize(rows, lambda directories: directories)


def example() -> Results:
    return summary(
        row("limit", [(1.0, 0.5), (2.0, 0.5)], directories=(A,)),
        row("limit", [(1.0, 0.5), (1.0, 0.5)], directories=(B,)),
        row("raw", [(0.5, 0.25), (0.5, 0.25)], directories=(A, B), setting=Setting()),
        row("infinity", [(0.5, 0.5), (1.0, 0.5)], directories=(A, B), setting=Setting()),
        row("peer", [(2.0, 1.0), (3.0, 2.0)]),
    )


def test_spread_is_the_median_and_the_range() -> None:
    assert spread([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)


def test_shares_compare_with_the_sum_of_the_disks_in_the_same_run() -> None:
    _, _, raw, infinity, peer = example().figures
    # The disks gave 2 GB/s together in the first run, 1.5 in the second; the row gave 2, then 1.
    assert infinity.share["save"] == spread([1.0, 1 / 1.5])
    assert infinity.share["load"] == spread([0.5, 0.5])
    assert infinity.limit["save"] == spread([2 * GB, 1.5 * GB])
    assert infinity.returned_seconds == spread([0.25, 0.5])
    assert raw.share["load"] == spread([1.0, 1.0])
    # A peer in one directory has that disk alone for its limit.
    assert peer.share["save"] == spread([0.5, 2 / 3])


def test_summary_leaves_out_runs_that_not_everybody_has_finished() -> None:
    results = summary(
        row("limit", [(1.0, 1.0)] * 3),
        row("infinity", [(1.0, 1.0), (2.0, 1.0)], setting=Setting()),
    )
    assert results.num_runs == 2
    assert results.figures[0].durable_seconds == spread([1.0, 1.0])


def test_summary_of_nothing_has_no_figures() -> None:
    results = summary(row("limit", []), row("infinity", [], setting=Setting()))
    assert (results.figures, results.num_runs) == ((), 0)
    assert recommend(results) is None


def test_summary_keeps_failures_apart() -> None:
    failed = row("peer", [(1.0, 1.0)])
    failed.failure = "OSError: no"
    results = summary(row("limit", [(1.0, 1.0)] * 2), failed)
    assert results.num_runs == 2
    assert results.failures == ((failed, "OSError: no"),)
    assert [one.row.contestant.role for one in results.figures] == ["limit"]


def sweep(*times: tuple[int, int, float]) -> Results:
    """Rows of queue depth, block KiB and the seconds of a save and of a load."""
    rows = [
        row(
            "infinity",
            [(seconds, seconds)],
            setting=Setting(queue_depth=depth, block_bytes=block << 10),
        )
        for depth, block, seconds in times
    ]
    return summary(row("limit", [(1.0, 1.0)]), *rows)


def test_recommended_is_the_fastest() -> None:
    best = recommend(sweep((4, 1024, 2.0), (32, 1024, 1.0), (64, 1024, 1.5)))
    assert best is not None
    assert (best.setting.queue_depth, best.num_settings, best.num_close) == (32, 3, 0)


def test_recommended_of_equally_fast_ones_takes_least() -> None:
    best = recommend(sweep((64, 1024, 1.0), (8, 1024, 1.015), (8, 4096, 1.0), (4, 1024, 1.03)))
    assert best is not None
    assert (best.setting.queue_depth, best.setting.block_bytes) == (8, 1 << 20)
    assert best.num_close == 2


def test_recommended_is_for_the_most_directories() -> None:
    slow, fast = Setting(queue_depth=1), Setting(queue_depth=2)
    results = summary(
        row("limit", [(1.0, 1.0)], directories=(A,)),
        row("limit", [(1.0, 1.0)], directories=(B,)),
        row("infinity", [(1.0, 1.0)], directories=(A,), setting=fast),
        row("infinity", [(3.0, 3.0)], directories=(A, B), setting=fast),
        row("infinity", [(2.0, 2.0)], directories=(A, B), setting=slow),
    )
    best = recommend(results)
    assert best is not None
    assert best.setting == slow


def ratios(results: Results) -> list[tuple[str, str, float, float]]:
    found = compare(results, recommend(results), WORKLOADS)
    return [
        (one.subject, one.reference, one.ratio["save"].median, one.ratio["load"].median)
        for one in found
    ]


def test_comparisons_pair_the_runs_of_this_library_and_a_peer() -> None:
    results = summary(
        row("limit", [(1.0, 1.0)] * 3),
        row("infinity", [(1.0, 1.0), (1.0, 2.0), (4.0, 1.0)], setting=Setting()),
        row("peer", [(2.0, 3.0), (3.0, 2.0), (4.0, 5.0)]),
    )
    (one,) = compare(results, recommend(results), WORKLOADS[:1])
    assert (one.subject, one.reference) == ("infinity, 1 dir", "torch, 1 dir")
    assert one.ratio["save"] == spread([2.0, 3.0, 1.0])
    assert one.ratio["load"] == spread([3.0, 1.0, 5.0])


def test_comparisons_set_raw_io_against_fio_with_the_same_setting() -> None:
    shallow, deep = Setting(queue_depth=4), Setting(queue_depth=8)
    results = summary(
        row("limit", [(1.0, 1.0)]),
        row("raw", [(1.0, 1.0)], setting=shallow),
        row("raw", [(2.0, 1.0)], setting=deep),
        row("peer", [(1.0, 2.0)], setting=deep, system=Fio(deep)),
    )
    assert ratios(results) == [
        ("raw, 1 dir, auto 8 x 1 MiB", "fio, 1 dir, auto 8 x 1 MiB", 0.5, 2.0)
    ]


def test_comparisons_set_states_against_the_last_one_named() -> None:
    results = summary(
        row("limit", [(1.0, 1.0)]),
        row("infinity", [(2.0, 4.0)], setting=Setting(), workload=0),
        row("infinity", [(1.0, 1.0)], setting=Setting(), workload=1),
        row("peer", [(1.0, 1.0)], workload=1),
    )
    few, many = "infinity, 1 dir, 1 x 953.7 MiB", "infinity, 1 dir, 244140 x 4 KiB"
    assert ratios(results) == [
        (few, "torch, 1 dir, 1 x 953.7 MiB", 1.0, 1.0),
        (many, few, 0.5, 0.25),
    ]


def rendered(*parts: Any) -> str:
    console = Console(width=160, record=True, quiet=True)
    with console.capture() as captured:
        console.quiet = False
        for part in parts:
            console.print(part)
    return captured.get()


def test_table_shows_every_row_with_seconds_speed_and_share() -> None:
    results = example()
    text = rendered(results_table(results, WORKLOADS[:1]))
    line = next(line for line in text.splitlines() if "infinity" in line)
    assert re.split(r" {2,}", line.strip()) == [
        *("infinity", "2", "0.375", "0.750 ±33%", "1.50", "83%"),
        *("0.500 ± 0%", "2.00", "50%"),
    ]
    assert "disk 2 is /ssd/b" in text
    assert "depth" not in text


@pytest.mark.parametrize("name", ["x[/b]", "x[bold]", "x:smile:", "[link=a]x"])
def test_table_shows_paths_and_names_as_they_are(name: str) -> None:
    folder, system = Path("/tmp") / name, type("Named", (TorchSave,), {"name": name})()
    results = summary(
        row("limit", [(1.0, 0.5)], directories=(folder,)),
        row("infinity", [(1.0, 0.5)], directories=(folder,), setting=Setting()),
        row("peer", [(1.0, 0.5)], directories=(folder,), system=system),
    )
    text = rendered(results_table(results, WORKLOADS[:1]))
    assert f"disk 1 is /tmp/{name}" in text
    assert any(line.startswith((f" {name} ", name)) for line in text.splitlines())
    ratio = dict.fromkeys(DIRECTIONS, Spread(1.0, 1.0, 1.0))
    assert name in rendered(comparison_table([Comparison(name, "other", ratio)]))


def test_table_of_a_sweep_shows_what_differs() -> None:
    text = rendered(results_table(sweep((4, 1024, 2.0), (8, 1024, 1.0)), WORKLOADS))
    assert "depth" in text
    assert "244140 x 4 KiB" in text
    assert "lanes" not in text


def test_text_below_the_table_tells_setting_failures_and_page_cache() -> None:
    failed = row("peer", [])
    failed.failure = "OSError: broken"
    results = summary(row("limit", [(1.0, 1.0)]), failed)
    notes = rendered(*closing_notes(results, [("zarr", "it is not installed")], "from disk"))
    assert "Reads: from disk." in notes
    assert "Left out: zarr: it is not installed." in notes
    assert "Failed: torch: OSError: broken" in notes
    best = recommend(sweep((4, 1024, 1.0), (8, 1024, 1.01)))
    assert best is not None
    text = rendered(*recommendation_text(best, num_directories=2))
    assert "Recommended of 2 settings: auto, depth 4" in text
    assert "1 more" in text
    assert "aio.Engine('auto', queue_depth=4, block_bytes=1048576, lanes=2)" in text
    single = recommend(sweep((4, 1024, 1.0)))
    assert single is not None
    assert "--sweep compares" in rendered(*recommendation_text(single, num_directories=1))
    comparisons = compare(example(), recommend(example()), WORKLOADS[:1])
    assert "3.50 (3.00 to 4.00)" in rendered(comparison_table(comparisons))


def test_json_has_every_sample_and_what_came_of_it() -> None:
    results = example()
    best = recommend(results)
    text = to_json(results, best, compare(results, best, WORKLOADS), WORKLOADS, {"page_cache": "x"})
    document = json.loads(text)
    assert (document["program"], document["layout"], document["page_cache"]) == (
        "ckpt-bench",
        1,
        "x",
    )
    assert [one["role"] for one in document["rows"]] == [
        *("limit", "limit", "raw", "infinity", "peer")
    ]
    own = document["rows"][3]
    assert own["save"]["durable_seconds"] == {"median": 0.75, "low": 0.5, "high": 1.0}
    assert own["load"]["bytes_per_second"]["median"] == 2 * GB
    assert own["save"]["of_limit"]["high"] == pytest.approx(1.0)
    assert len(own["samples"]) == 2
    assert document["recommended"]["queue_depth"] == 32
    assert document["comparisons"][0]["ratio"]["save"]["median"] == pytest.approx(3.5)


@pytest.mark.parametrize("name", ["plot.png", "plot.svg"])
@pytest.mark.parametrize(
    "results",
    [
        example(),
        sweep((4, 1024, 2.0), (8, 1024, 1.0), (4, 256, 1.0)),
        sweep((4, 64, 1.0), (4, 256, 1.0)),
    ],
    ids=["bars", "depths", "blocks"],
)
def test_plot_is_written_in_the_format_of_its_name(
    results: Results, name: str, tmp_path: Path
) -> None:
    draw(results, WORKLOADS[:1], tmp_path / name)
    start = (tmp_path / name).read_bytes()[:8]
    assert start == (b"\x89PNG\r\n\x1a\n" if name.endswith("png") else b"<?xml ve")
