"""Fine-tunes a Hugging Face causal language model on sequences whose activations do not fit.

    python examples/long_context.py --model MODEL_FOLDER --text book.txt --nvme /mnt/nvme0 \
        --sequence 32768 --activations nvme --output tuned

What the backward pass needs is kept in one of three places, for the same losses, bit for bit:
`--activations keep` leaves it in memory, the fastest as long as it fits; `host` moves it from a GPU
to memory, `nvme` to the SSD but for the latest, both within the budget. `--recompute` keeps the
inputs of layers alone and computes the rest again, and goes with each of the three. Prints the loss
and the seconds of each step, and the most memory that the process has held.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import torch
from hf_folder import batch_of_step, encode, model_without_weights, tokenizer_of

import infinity


def train(options: argparse.Namespace) -> None:
    tokens = encode(options.text.read_text(), tokenizer_of(options.model))
    model = model_without_weights(options.model, torch.bfloat16).train()
    if options.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with infinity.offload(
        model,
        options.nvme,
        weights=options.model,
        optimizer=infinity.AdamW(lr=options.learning_rate),
        host_memory=options.host_memory,
        activations=options.activations,
    ) as offloaded:
        for step in range(options.steps):
            begin = time.perf_counter()
            rows = batch_of_step(tokens, step, 1, options.sequence).to(model.device)
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
            loss.backward()
            offloaded.step()
            seconds = time.perf_counter() - begin
            print(f"step {step + 1}: loss {loss.item():.6f}, {seconds:.2f} s", flush=True)
        offloaded.export(options.output)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"peak memory of the process {peak:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder with the model")
    parser.add_argument("--text", type=Path, required=True, help="a long text to train on")
    parser.add_argument("--nvme", type=Path, required=True, help="a directory on a local SSD")
    parser.add_argument("--output", type=Path, required=True, help="folder for the tuned weights")
    parser.add_argument("--host-memory", default="16GiB", help="the budget")
    parser.add_argument("--activations", default="nvme", choices=("keep", "host", "nvme"))
    parser.add_argument("--recompute", action="store_true", help="compute layers again in backward")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sequence", type=int, default=32768, help="tokens in a row")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
