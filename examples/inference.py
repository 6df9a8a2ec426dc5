"""Generates text with a Hugging Face causal language model that is larger than the memory for it.

    pip install ".[examples]"
    python examples/inference.py --model MODEL_FOLDER --nvme /mnt/nvme0 --host-memory 8GiB \
        --prompt "Once upon a time" --tokens 50

With `optimizer=None` weights are all the state there is: 2 bytes a parameter. Those beyond the
budget are read once for every token, so the disk sets the pace; `--batch` rows share each read.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from hf_folder import decode, encode, model_without_weights, tokenizer_of
from transformers import GenerationConfig

import infinity


@torch.no_grad()
def generate(options: argparse.Namespace) -> None:
    tokenizer = tokenizer_of(options.model)
    prompt = encode(options.prompt, tokenizer).repeat(options.batch, 1)
    model = model_without_weights(options.model, torch.bfloat16).eval()
    model.requires_grad_(False)  # or room on NVMe would be set aside for gradients
    if (options.model / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(options.model)
    torch.manual_seed(options.seed)
    with infinity.offload(
        model,
        options.nvme,
        weights=options.model,
        optimizer=None,
        host_memory=options.host_memory,
    ) as offloaded:
        prompt = prompt.to(model.device)
        rows = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=options.tokens,
            do_sample=options.sample,
        )
        for row in rows:
            new = row[prompt.shape[1] :]
            print(f"tokens {' '.join(map(str, new.tolist()))}")
            print(options.prompt + decode(new, tokenizer), flush=True)
        print(offloaded.report())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder with the model")
    parser.add_argument("--nvme", type=Path, required=True, help="a directory on a local SSD")
    parser.add_argument("--host-memory", default="8GiB", help="the budget")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=50, help="tokens to generate, at most")
    parser.add_argument("--batch", type=int, default=1, help="continuations of the prompt")
    parser.add_argument("--sample", action="store_true", help="draw tokens; else the likeliest")
    parser.add_argument("--seed", type=int, default=0)
    generate(parser.parse_args())


if __name__ == "__main__":
    main()
