"""Families of models at the least budget beside plain PyTorch in memory: the same bits. Each row of
the table in docs/COMPATIBILITY.md is asserted by the test that found it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support.compatibility import assert_documented
from tests.support.families import FAMILIES, LENGTH, Batch, Family
from tests.support.training import least_budget, same_bits, values_of

STEPS = 10
OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
STATE = 16
"""Bytes a parameter of what training in float32 keeps: weight, gradient, two moments."""


@dataclass(frozen=True, slots=True)
class Ran:
    losses: list[float]
    values: dict[str, torch.Tensor]
    tokens: torch.Tensor | None
    read_bytes: int = 0


def batches(family: Family) -> list[Batch]:
    rng = torch.Generator().manual_seed(1)
    return [family.batch(rng) for _ in range(STEPS)]


def trained(family: Family, model: nn.Module, step: Any) -> list[float]:
    losses = []
    for number, batch in enumerate(batches(family)):
        torch.manual_seed(number)  # of dropout
        loss = family.loss(model, batch)
        loss.backward()
        step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def generated(family: Family, model: Any) -> torch.Tensor | None:
    if not family.generates:
        return None
    model.eval()
    prompt = batches(family)[0]["input_ids"][:, : LENGTH // 2]
    found: torch.Tensor = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=4,
        min_new_tokens=4,
        do_sample=False,
        pad_token_id=2,
    )
    return found


def in_memory(family: Family, **checkpointing: Any) -> Ran:
    model: Any = family.make()
    _checkpoint(model, **checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    losses = trained(family, model, step)
    return Ran(losses, values_of(model), generated(family, model))


def offloaded_run(
    family: Family, nvme: Path, budget: int, folder: Path | None = None, **checkpointing: Any
) -> Ran:
    model: Any = family.make()
    _checkpoint(model, **checkpointing)
    optimizer = infinity.AdamW(**OPTIONS)
    with infinity.offload(model, nvme, optimizer=optimizer, host_memory=budget) as offloaded:
        losses = trained(family, model, offloaded.step)
        if folder is not None:
            offloaded.export(folder)
            for part in ("config", "generation_config"):
                if hasattr(getattr(model, part, None), "save_pretrained"):
                    getattr(model, part).save_pretrained(folder)
        tokens = generated(family, model)
        read_bytes = offloaded.report().read_bytes
    return Ran(losses, values_of(model), tokens, read_bytes)


def _checkpoint(model: Any, **options: Any) -> None:
    if options:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def assert_same(one: Ran, other: Ran) -> None:
    assert one.losses == other.losses
    for name, value in one.values.items():
        assert same_bits(value, other.values[name]), name
    if one.tokens is not None and other.tokens is not None:
        assert torch.equal(one.tokens, other.tokens)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_family_at_the_least_budget_has_the_bits_of_plain_torch(
    family: Family, nvme: Path, tmp_path: Path
) -> None:
    plain = in_memory(family)
    least = least_budget(family.make, nvme, optimizer=infinity.AdamW(**OPTIONS))
    ours = offloaded_run(family, nvme, least, tmp_path / "exported")
    assert ours.read_bytes > 0
    assert_same(plain, ours)
    comes_back = "-"
    if family.package == "transformers":
        again = family.kind.from_pretrained(tmp_path / "exported")
        for name, value in values_of(again).items():
            assert same_bits(value, plain.values[name]), name
        comes_back = "yes"
    numel = sum(p.numel() for p in family.make().parameters())
    release = version(family.package).split("+")[0]
    part = round(100 * least / (STATE * numel))
    assert part < 90, f"{part} % of the state is no little budget"
    assert_documented(
        f"| {family.name} | {family.package} {release} | {part} % | yes | "
        f"{'yes' if family.generates else '-'} | {comes_back} |"
    )


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_family_that_checkpoints_activations_has_the_bits_of_plain_torch(
    name: str, attention: str, use_reentrant: bool, nvme: Path
) -> None:
    [family] = [family for family in FAMILIES if family.name == name]
    family = replace(family, attention=attention, generates=False)
    least = least_budget(family.make, nvme, optimizer=infinity.AdamW(**OPTIONS))
    ours = offloaded_run(family, nvme, least, use_reentrant=use_reentrant)
    assert ours.read_bytes > 0
    assert_same(in_memory(family, use_reentrant=use_reentrant), ours)
