"""Models of Hugging Face on the meta device get the first values that they get in memory,
and those of a folder as ``from_pretrained`` reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.proof import matrix

pytest.importorskip("transformers", reason="needs transformers: pip install .[examples]")

import transformers as hub
from transformers import PreTrainedModel

import infinity
from tests.support.architectures import ARCHITECTURES
from tests.support.training import same_bits

ONLY_IN_CONSTRUCTORS = {
    "clip": ("logit_scale",),
    "vit mae": ("vit.embeddings.cls_token", "vit.embeddings.position_embeddings"),
}
"""Parameters to which only the constructor gives a value, lost on meta: refused by name."""


def _on_meta(name: str) -> PreTrainedModel:
    with torch.device("meta"):
        return ARCHITECTURES[name]()


def _initialised(
    model: nn.Module, nvme: Path, weights: Path | None = None
) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    with (
        infinity.offload(
            model, nvme, weights=weights, optimizer=None, host_memory="64MiB"
        ) as offloaded,
        offloaded.gathered(),
    ):
        named = [*model.named_parameters(), *model.named_buffers()]
        return {name: value.detach().clone() for name, value in named}


def _assert_drawn_alike(name: str, value: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits where no chance is in it; else the same spread, and the same zeros."""
    if same_bits(value, expected):
        return
    assert value.shape == expected.shape
    assert expected.std() > 0, f"{name} is no matter of chance"
    assert torch.equal(value == 0, expected == 0), f"zeros of {name}"
    error = 5 / (2 * value.numel()) ** 0.5  # five standard errors of a standard deviation
    assert value.std().item() == pytest.approx(expected.std().item(), rel=error), name
    bound = 10 * expected.std() / value.numel() ** 0.5
    assert abs(value.mean() - expected.mean()) < bound, name


@pytest.mark.parametrize("name", matrix(ARCHITECTURES, usual=[*ARCHITECTURES][::2]))
def test_model_on_meta_is_initialised_as_in_memory(name: str, nvme: Path) -> None:
    torch.manual_seed(1)
    plain = ARCHITECTURES[name]()
    model = _on_meta(name)
    if lost := ONLY_IN_CONSTRUCTORS.get(name, ()):
        message = f"{', '.join(lost)} is on the meta device and has no .* before"
        with pytest.raises(ValueError, match=message):
            _initialised(model, nvme)
    for path in lost:
        owner = model.get_submodule(path.rpartition(".")[0])
        like = plain.get_parameter(path)
        kept = nn.Parameter(like.detach().clone(), like.requires_grad)
        setattr(owner, path.rpartition(".")[2], kept)
    found = _initialised(model, nvme)
    named = dict([*plain.named_parameters(), *plain.named_buffers()])
    assert found.keys() == named.keys()
    for key, expected in named.items():
        _assert_drawn_alike(key, found[key], expected.detach())


def test_parameters_made_in_memory_beside_a_model_on_meta_are_refused_unwritten(
    nvme: Path,
) -> None:
    """``torch.FloatTensor(n)`` takes no notice of the device that a model is built on."""
    torch.manual_seed(1)
    plain = _xlnet()
    with torch.device("meta"):
        model = _xlnet()
    assert not model.transformer.layer[0].rel_attn.q.is_meta
    with pytest.raises(ValueError, match=r"mask_emb has no values: XLNetModel .*\.to\('meta'\)"):
        _initialised(model, nvme)
    found = _initialised(model.to("meta"), nvme)
    for key, expected in plain.named_parameters():
        _assert_drawn_alike(key, found[key], expected.detach())


def test_parameters_made_in_memory_beside_a_model_on_meta_are_kept_once_written(
    nvme: Path,
) -> None:
    torch.manual_seed(1)
    with torch.device("meta"):
        model = _xlnet()
    given = {name: p for name, p in model.named_parameters() if not p.is_meta}
    with torch.no_grad():
        for parameter in given.values():
            parameter.normal_()
    expected = {name: p.detach().clone() for name, p in given.items()}
    found = _initialised(model, nvme)
    assert len(expected) > len(found) / 3
    assert all(same_bits(found[name], value) for name, value in expected.items())


def _xlnet() -> Any:
    config = hub.XLNetConfig(vocab_size=128, d_model=32, n_layer=2, n_head=4, d_inner=48)
    return hub.XLNetLMHeadModel(config)


def _differing(model: PreTrainedModel) -> PreTrainedModel:
    """Biases and norms as well have a value of their own for each element."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.mark.parametrize("name", matrix(ARCHITECTURES, usual=[*ARCHITECTURES][1::2]))
def test_folder_gives_what_from_pretrained_gives(name: str, nvme: Path, tmp_path: Path) -> None:
    """Also where it merges, splits and renames what is stored."""
    plain = _differing(ARCHITECTURES[name]())
    plain.save_pretrained(tmp_path / "folder", max_shard_size="40KB")
    loaded = type(plain).from_pretrained(tmp_path / "folder")
    model = _on_meta(name)
    with (
        infinity.offload(
            model, nvme, weights=tmp_path / "folder", optimizer=None, host_memory="64MiB"
        ) as offloaded,
        offloaded.gathered(),
    ):
        found = dict([*model.named_parameters(), *model.named_buffers()])
        expected = dict([*loaded.named_parameters(), *loaded.named_buffers()])
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert same_bits(found[key], value), key


def test_what_cannot_be_converted_names_the_way_through_transformers(
    nvme: Path, tmp_path: Path
) -> None:
    plain = ARCHITECTURES["mixtral"]()
    plain.save_pretrained(tmp_path / "folder")
    file = tmp_path / "folder" / "model.safetensors"
    state = load_file(file)
    name = next(name for name in state if "experts.1.w1" in name)
    state[name] = torch.zeros(3, 5)
    save_file(state, file)
    with pytest.raises(
        ValueError, match=r"cannot be converted .*MixtralForCausalLM\.from_pretrained"
    ):
        _initialised(_on_meta("mixtral"), nvme, weights=tmp_path / "folder")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("init", [True, "gaussian"])
def test_adapters_on_meta_begin_as_peft_begins_them(init: bool | str, nvme: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=init)
    with torch.device("meta"):
        model = peft.get_peft_model(ARCHITECTURES["llama, tied"](), config)
    if init is not True:
        with pytest.raises(ValueError, match=r"lora_A\.default\.weight.* is on the meta device"):
            _initialised(model, nvme)
        return
    plain = peft.get_peft_model(ARCHITECTURES["llama, tied"](), config)
    found = _initialised(model, nvme)
    for key, expected in plain.named_parameters():
        _assert_drawn_alike(key, found[key], expected.detach())
