"""Trainers of TRL at the least budget, killed in the middle and resumed, beside the same in
memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import LlamaForCausalLM

from infinity.integrations import trl as offloaded_trl
from infinity.integrations.transformers import (
    OffloadArguments,
    OffloadArgumentsMixin,
    OffloadMixin,
)
from tests.support.compatibility import assert_documented, row
from tests.support.trainers import (
    KillAt,
    Run,
    arguments,
    assert_same,
    least_of,
    logged_by,
    run_killed,
    state_bytes_of,
)
from tests.support.training import same_bits, values_of
from tests.support.trl_runs import case

CASES = ("SFT", "DPO", "GRPO")
_NOT_ALIKE = ("num_tokens", "eval_num_tokens")
"""TRL itself counts tokens from zero after resuming."""


def _train(kind: Any, given: dict[str, Any], *, resume: bool = False) -> Run:
    trainer = kind(**given)
    trainer.train(resume_from_checkpoint=resume)
    if isinstance(trainer, OffloadMixin):
        trainer.close()
    return Run(logged_by(trainer), values_of(trainer.model))


def killed_at_step_3(name: str, folder: str, nvme: str, host_memory: int) -> None:
    """In a process of its own: the checkpoint of step 2 is saved by then."""
    _, given = case(name, Path(folder))
    given |= {"nvme": nvme, "host_memory": host_memory, "callbacks": [KillAt(3)]}
    _train(getattr(offloaded_trl, f"Offload{name}Trainer"), given)


@pytest.mark.parametrize("name", CASES)
def test_trainer_of_trl_gives_the_bits_of_the_one_in_memory_also_after_a_kill(
    tmp_path: Path, nvme: Path, name: str
) -> None:
    kind, given = case(name, tmp_path / "plain", save_strategy="no")
    plain = _train(kind, given)
    offloaded = getattr(offloaded_trl, f"Offload{name}Trainer")
    folder = tmp_path / "killed"
    _, given = case(name, folder)
    least = least_of(offloaded, nvme=nvme, **given)
    call = f"killed_at_step_3({name!r}, {str(folder)!r}, {str(nvme)!r}, {least})"
    run_killed(f"{__name__}:{call}")
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-2"]
    _, given = case(name, folder)
    given |= {"nvme": nvme, "host_memory": least}
    state = state_bytes_of(given["model"], given.get("ref_model"))
    assert_same(plain, _train(offloaded, given, resume=True), except_logged=_NOT_ALIKE)
    assert_documented(row(f"`{name}Trainer`", "trl", least_bytes=least, state_bytes=state))


def test_reference_model_comes_back_as_it_was(tmp_path: Path, nvme: Path) -> None:
    _, given = case("DPO", tmp_path / "run", max_steps=1, save_strategy="no")
    reference = given["ref_model"]
    before = values_of(reference)
    with offloaded_trl.OffloadDPOTrainer(**given, nvme=nvme, host_memory="64MiB") as trainer:
        trainer.train()
        assert type(reference.lm_head.weight) is not torch.nn.Parameter
    assert all(same_bits(before[name], value) for name, value in values_of(reference).items())


def test_every_trainer_of_trl_has_an_offloaded_one() -> None:
    for name in dir(offloaded_trl):
        made = getattr(offloaded_trl, name)
        assert issubclass(made, (OffloadMixin, OffloadArgumentsMixin))
        assert issubclass(made, getattr(trl, name.removeprefix("Offload")))
    assert {"OffloadKTOTrainer", "OffloadRLOOTrainer", "OffloadSFTConfig"} <= set(
        dir(offloaded_trl)
    )
    with pytest.raises(AttributeError, match="OffloadNothing"):
        _ = offloaded_trl.OffloadNothing


@pytest.mark.parametrize("name", ["SFT", "DPO"])
def test_model_that_is_named_is_never_in_memory_as_a_whole(
    tmp_path: Path, nvme: Path, name: str
) -> None:
    source = tmp_path / "source"
    kind, given = case(name, tmp_path / "plain", save_strategy="no", max_steps=2)
    given["model"].save_pretrained(source)
    if "ref_model" in given:  # TRL would load it later, and draw random numbers then
        given["ref_model"] = LlamaForCausalLM.from_pretrained(source)
    plain = _train(kind, given | {"model": str(source)})
    _, given = case(name, tmp_path / "run", max_steps=2, save_strategy="no")
    given.pop("ref_model", None)
    given |= {"model": str(source), "nvme": nvme, "host_memory": "24MiB"}
    with getattr(offloaded_trl, f"Offload{name}Trainer")(**given) as trainer:
        assert all(parameter.is_meta for parameter in trainer.model.parameters())
        trainer.train()
        trainer.save_model(str(tmp_path / "tuned"))
    assert all(parameter.is_meta for parameter in trainer.model.parameters())
    tuned = LlamaForCausalLM.from_pretrained(tmp_path / "tuned")
    assert all(same_bits(plain.values[n], value) for n, value in tuned.named_parameters())


def test_arguments_with_options_of_offload_are_taken_as_trl_takes_plain_ones(
    tmp_path: Path, nvme: Path
) -> None:
    kind, given = case("SFT", tmp_path / "plain")
    options: dict[str, Any] = {"max_steps": 2, "save_strategy": "no", "hub_token": "secret"}
    plain = _train(kind, given | {"args": arguments(tmp_path / "plain", **options)})
    _, given = case("SFT", tmp_path / "run")
    options |= {"nvme": nvme, "host_memory": "64MiB"}
    args = arguments(tmp_path / "run", OffloadArguments, **options)
    with offloaded_trl.OffloadSFTTrainer(**given | {"args": args}) as trainer:
        trainer.train()
    assert isinstance(trainer.args, offloaded_trl.OffloadSFTConfig)
    reached: Any = trainer.args
    assert (reached.nvme, reached.hub_token) == ([str(nvme)], "secret")
    found = values_of(trainer.model)
    assert all(same_bits(value, found[name]) for name, value in plain.values.items())


def test_trainer_that_reads_arguments_of_its_own_class_says_so(tmp_path: Path, nvme: Path) -> None:
    _, given = case("DPO", tmp_path / "run")
    args = arguments(tmp_path / "run", OffloadArguments, nvme=nvme)
    with pytest.raises(TypeError, match=r"DPOTrainer reads .* give it an OffloadDPOConfig"):
        offloaded_trl.OffloadDPOTrainer(**given | {"args": args})
