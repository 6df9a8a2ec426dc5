"""Trains LoRA adapters (arXiv 2106.09685) beside frozen weights that are streamed from NVMe.

    pip install ".[examples]"
    python examples/lora.py --model MODEL_FOLDER --text corpus.txt --nvme /mnt/nvme0 \
        --host-memory 8GiB --steps 100 --output adapters.safetensors

Frozen weights have no gradient, master or moments: 2 bytes a parameter, read and never written
back. The adapters are plain PyTorch in float32, and only they are saved.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from hf_folder import batch_of_step, encode, model_without_weights, tokenizer_of, weight_files
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import infinity


class LoRALinear(nn.Linear):
    """A frozen Linear, under its old names, and a trained update of low rank."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        has_bias = linear.bias is not None
        super().__init__(linear.in_features, linear.out_features, has_bias, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.requires_grad_(False)
        self.scale = alpha / rank
        self.lora_a = nn.Parameter(torch.empty(rank, self.in_features))
        self.lora_b = nn.Parameter(torch.zeros(self.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=5**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update = F.linear(F.linear(x.float(), self.lora_a), self.lora_b) * self.scale
        return super().forward(x) + update.to(x.dtype)


def add_adapters(
    model: nn.Module, targets: list[str], rank: int, alpha: float
) -> dict[str, nn.Parameter]:
    """Freeze `model` and give the Linears called `targets` adapters; returns those by name."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets:
            model.set_submodule(name, LoRALinear(module, rank, alpha))
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not adapters:
        raise SystemExit(f"the model has no Linear called {' or '.join(targets)}")
    return adapters


def first_values(folder: Path, adapters: dict[str, nn.Parameter], together: Path) -> Path:
    """An index of the model's own files and one of the adapters' values."""
    where = dict.fromkeys(adapters, "lora.safetensors")
    for file in weight_files(folder):
        (together / file.name).symlink_to(file.resolve())
        with safe_open(file, framework="pt") as opened:
            where |= dict.fromkeys(opened.keys(), file.name)
    save_file({name: p.detach() for name, p in adapters.items()}, together / "lora.safetensors")
    (together / "weights.index.json").write_text(json.dumps({"weight_map": where}))
    return together / "weights.index.json"


def train(options: argparse.Namespace) -> None:
    tokens = encode(options.text.read_text(), tokenizer_of(options.model))
    model = model_without_weights(options.model, torch.bfloat16)
    torch.manual_seed(options.seed)
    adapters = add_adapters(model, options.targets, options.rank, options.alpha)
    trained = sum(p.numel() for p in adapters.values())
    print(f"{trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters are trained")
    print(infinity.plan(model, nvme=options.nvme, host_memory=options.host_memory))
    with (
        tempfile.TemporaryDirectory() as together,
        infinity.offload(
            model,
            options.nvme,
            weights=first_values(options.model, adapters, Path(together)),
            optimizer=infinity.AdamW(lr=options.learning_rate),
            host_memory=options.host_memory,
            max_grad_norm=1.0,
        ) as offloaded,
    ):
        model.train()
        for step in range(options.steps):
            rows = batch_of_step(tokens, step, options.batch, options.sequence).to(model.device)
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
            loss.backward()
            offloaded.step()
            print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)
        with offloaded.gathered(adapters.values()):
            values = {name: p.detach().cpu().clone() for name, p in adapters.items()}
        print(offloaded.report())
    save_file(values, options.output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder with the model")
    parser.add_argument("--text", type=Path, required=True, help="a text file to train on")
    parser.add_argument("--nvme", type=Path, required=True, help="a directory on a local SSD")
    parser.add_argument("--output", type=Path, required=True, help="file for the adapters")
    parser.add_argument("--host-memory", default="8GiB", help="the budget")
    parser.add_argument("--targets", nargs="+", default=["q_proj", "v_proj"], metavar="NAME")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16.0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512, help="tokens in a row")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
