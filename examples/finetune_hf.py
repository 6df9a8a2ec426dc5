"""Fine-tunes a Hugging Face causal language model with its weights and optimizer state on NVMe.

    pip install ".[examples]"
    python examples/finetune_hf.py --model MODEL_FOLDER --text corpus.txt --nvme /mnt/nvme0 \
        --host-memory 16GiB --steps 100 --output tuned

MODEL_FOLDER has config.json and safetensors files, as `save_pretrained` or a download leaves them;
without a tokenizer in it, tokens are bytes. `from_pretrained("tuned")` loads the result.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from hf_folder import batch_of_step, encode, model_without_weights, tokenizer_of

import infinity


def train(options: argparse.Namespace) -> None:
    tokens = encode(options.text.read_text(), tokenizer_of(options.model))
    model = model_without_weights(options.model, torch.bfloat16)
    model.train()
    print(infinity.plan(model, nvme=options.nvme, host_memory=options.host_memory))
    with infinity.offload(
        model,
        options.nvme,
        weights=options.model,
        optimizer=infinity.AdamW(lr=options.learning_rate, weight_decay=0.01),
        host_memory=options.host_memory,
        max_grad_norm=1.0,
    ) as offloaded:
        for step in range(options.steps):
            rows = batch_of_step(tokens, step, options.batch, options.sequence).to(model.device)
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
            loss.backward()
            offloaded.step()
            norm = offloaded.grad_norm.item()
            print(f"step {step + 1}: loss {loss.item():.6f}, gradient norm {norm:.6f}", flush=True)
        offloaded.export(options.output)
        print(offloaded.report())
    copy_description(options.model, options.output)
    model.config.save_pretrained(options.output)  # with the dtype that the weights have now


def copy_description(source: Path, output: Path) -> None:
    """Put what else `from_pretrained` wants beside the weights: config and tokenizer."""
    for file in source.iterdir():
        is_index = file.name.endswith(".index.json")
        if file.suffix in {".json", ".model", ".txt", ".jinja"} and not is_index:
            shutil.copy(file, output / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder with the model")
    parser.add_argument("--text", type=Path, required=True, help="a text file to train on")
    parser.add_argument("--nvme", type=Path, required=True, help="a directory on a local SSD")
    parser.add_argument("--output", type=Path, required=True, help="folder for the tuned model")
    parser.add_argument("--host-memory", default="16GiB", help="the budget")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512, help="tokens in a row")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
