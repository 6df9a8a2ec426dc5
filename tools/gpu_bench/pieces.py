"""The pieces that compare offloaded training with training in device memory, and what they need."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from disk_bandwidth import PROBE_BYTES, measure_disk
from host_rates import measure_host

from checkpoint.bench.systems.fio import bytes_and_seconds
from gpu_bench.budgets import host_memory_for, plan_of
from gpu_bench.context import Context, Record
from gpu_bench.jobs import Job
from gpu_bench.link_rates import measure_link
from gpu_bench.sizes import BASELINE_BYTES, HIDING_BYTES, OFFLOADED_BYTES, PEER_BYTES
from gpu_bench.systems import Answer, Request, System

BASELINE = (
    f"{BASELINE_BYTES} bytes a parameter in device memory: bfloat16 weights and gradients, float32 "
    "masters and moments; torch's fused AdamW for its time, for its bits AdamW with the roundings "
    "of the library's kernel"
)
_PROBES = {"full": PROBE_BYTES, "small": 16 << 20}
_SHRINKING = 0.95
"""A model that finds no room is tried again so much less deep."""


def rates(context: Context, record: Record) -> None:
    """What the machine does: copies over the link, bytes of the disks, parameters of AdamW."""
    record.note(link=asdict(measure_link(context.device, context.scale.link_bytes)))
    record.note(host=asdict(measure_host(torch.bfloat16)))
    record.note(disk=_disk(context))
    if shutil.which("fio"):
        record.note(fio={way: _by_fio(context, way) for way in ("write", "read")})


def host(name: str, context: Context, record: Record) -> None:
    """All state in host memory, beside all in device memory: bits, time, copies."""
    depth = context.depth()
    jobs = [context.job("memory", depth=depth), _on_host(context, depth)]
    sequences = context.scale.host_tokens[name] // context.scale.sequence
    _note_sizes(context, record, jobs[1], sequences)
    with context.systems(jobs) as systems:
        record.note(bits=_same_bits(context, systems, sequences))
        _take_turns(context, record, systems, sequences)
        request = Request(do="copies", sequences=sequences, steps=2)
        record.note(**systems["offloaded"].answer(request))
    record.note(link=asdict(measure_link(context.device, context.scale.link_bytes)))


def nvme(context: Context, record: Record) -> None:
    """Half of the state on NVMe: a step over the larger of computing and its bytes."""
    depth = context.depth(uses_disks=True)
    job = context.job("offloaded", depth=depth)
    job = replace(job, host_memory=host_memory_for(job, 0.5, _most_host_bytes(context)))
    jobs = [context.job("memory", depth=depth), job]
    sequences = context.scale.largest_batch // context.scale.sequence
    _note_sizes(context, record, jobs[1], sequences)
    with context.systems(jobs) as systems:
        record.note(bits=_same_bits(context, systems, sequences))
        _take_turns(context, record, systems, sequences, with_disk=True)


def large(context: Context, record: Record) -> None:
    """A model that does not fit the device trains, within its budgets."""
    scale = context.scale
    depth = scale.depth_for(scale.large_parameters)
    tokens = min(scale.host_tokens.values())
    while True:
        budget = scale.device_memory_beside(depth, tokens, context.device_bytes)
        job = replace(
            context.job("offloaded", depth=depth),
            device_memory=budget,
            host_memory=min(_most_host_bytes(context), OFFLOADED_BYTES * scale.parameters(depth)),
        )
        if depth == 1 or plan_of(job, job.host_memory).nvme_bytes <= context.disk_bytes:
            break
        depth = int(depth * _SHRINKING)
    sequences = tokens // scale.sequence
    _note_sizes(context, record, job, sequences)
    with context.systems([job]) as systems:
        _take_turns(context, record, systems, sequences, rounds=1)


def deepspeed(context: Context, record: Record) -> None:
    """DeepSpeed's ZeRO-3 in host memory, beside ours."""
    if find_spec("deepspeed") is None:
        record.note(skipped="deepspeed is not installed: pip install '.[bench]'")
        return
    depth = context.depth(bytes_on_host=OFFLOADED_BYTES + PEER_BYTES)
    jobs = [_on_host(context, depth), context.job("deepspeed", depth=depth)]
    sequences = context.scale.largest_batch // context.scale.sequence
    _note_sizes(context, record, jobs[0], sequences)
    with context.systems(jobs) as systems:
        _take_turns(context, record, systems, sequences)


def _most_host_bytes(context: Context) -> int:
    return context.host_bytes - context.scale.host_reserve


def _on_host(context: Context, depth: int) -> Job:
    """Everything in host memory, and room for hiding updates if there is some."""
    job, most = context.job("offloaded", depth=depth), _most_host_bytes(context)
    least = host_memory_for(job, 0.0, most)
    more = HIDING_BYTES * context.scale.parameters(depth)
    return replace(job, host_memory=min(most, least + more))


def _note_sizes(context: Context, record: Record, job: Job, sequences: int) -> None:
    plan = plan_of(job, job.host_memory)
    record.note(
        baseline=BASELINE,
        parameters=context.scale.parameters(job.depth),
        depth=job.depth,
        width=job.width,
        tokens=sequences * job.sequence,
        bytes_by_tier=dict(plan.bytes_by_tier),
        nvme_wanted_bytes=plan.nvme_wanted_bytes,
        disk_bytes=context.disk_bytes,
        host_memory=job.host_memory,
        device_memory=job.device_memory,
        device_bytes=context.device_bytes,
        activation_bytes=context.scale.activation_bytes(job.depth, sequences * job.sequence),
    )


def _same_bits(context: Context, systems: Mapping[str, System], sequences: int) -> dict[str, Any]:
    """Whether losses and weights of all systems are the same after some steps."""
    steps = context.scale.bits_steps
    request = Request(do="bits", sequences=sequences, steps=steps)
    found = {name: system.answer(request) for name, system in systems.items()}
    first, *others = found.values()
    different = sum(
        own != expected
        for other in others
        for own, expected in zip(other["weights"], first["weights"], strict=True)
    )
    return {
        "steps": steps,
        "losses": {name: answer["losses"] for name, answer in found.items()},
        "same_losses": all(other["losses"] == first["losses"] for other in others),
        "parameters": len(first["weights"]),
        "different_parameters": different,
    }


def _take_turns(
    context: Context,
    record: Record,
    systems: Mapping[str, System],
    sequences: int,
    *,
    with_disk: bool = False,
    rounds: int | None = None,
) -> None:
    """Blocks of all systems in turn, in one order and in the other, while there is time."""
    request = Request(do="block", sequences=sequences, steps=context.scale.steps)
    done: list[dict[str, Any]] = []
    took = 0.0
    while len(done) < (rounds or context.scale.rounds) and (not done or context.has_time_for(took)):
        started = time.monotonic()
        order: Sequence[str] = [*systems] if len(done) % 2 == 0 else [*systems][::-1]
        samples: dict[str, Answer] = {name: systems[name].answer(request) for name in order}
        entry: dict[str, Any] = {"samples": samples}
        if with_disk:
            entry["disk"] = _disk(context)
        done.append(entry)
        record.note(rounds=done)
        took = time.monotonic() - started


def _disk(context: Context) -> dict[str, float]:
    return asdict(measure_disk(context.nvme, probe_bytes=_probe_bytes(context)))


def _probe_bytes(context: Context) -> int:
    return _PROBES["small" if context.device == "cpu" else "full"]


def _by_fio(context: Context, way: str) -> float:
    """Bytes a second of the first directory, by requests as the library has them."""
    with tempfile.TemporaryDirectory(dir=context.nvme[0]) as folder:
        command = [
            *("fio", "--output-format=json", "--name=job", f"--filename={folder}/file"),
            *(f"--rw={way}", "--direct=1", "--ioengine=libaio", "--iodepth=32", "--bs=1M"),
            *(f"--size={_probe_bytes(context)}", "--end_fsync=1", "--invalidate=0"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    nbytes, seconds = bytes_and_seconds(way, done.stdout)
    return nbytes / seconds


HOST = {name: partial(host, name) for name in ("host32k", "host16k", "host8k")}
