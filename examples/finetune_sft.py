"""Fine-tunes a language model by TRL's SFTTrainer, within a budget of host memory.

    pip install ".[trl]"
    python examples/finetune_sft.py --model MODEL_FOLDER --data texts.jsonl --nvme /mnt/nvme0 \
        --host-memory 8GiB --steps 100 --output tuned

MODEL_FOLDER has config.json, safetensors files and a tokenizer. Every line of the data is JSON with
a "text", or with "messages". Run again with --resume after an end, a kill or a power cut, it goes
on from the last checkpoint to the same bits. `from_pretrained("tuned")` loads the result.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import datasets
import torch

from infinity.integrations.trl import OffloadSFTConfig, OffloadSFTTrainer


def train(options: argparse.Namespace) -> None:
    rows = [json.loads(line) for line in options.data.read_text().splitlines() if line.strip()]
    with OffloadSFTTrainer(
        model=str(options.model),
        args=OffloadSFTConfig(
            output_dir=str(options.output),
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulate,
            learning_rate=options.learning_rate,
            max_length=options.sequence,
            logging_steps=1,
            save_steps=options.save_steps,
            save_total_limit=2,
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            nvme=[str(folder) for folder in options.nvme],
            host_memory=options.host_memory,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
    ) as trainer:
        trainer.train(resume_from_checkpoint=options.resume)
        trainer.save_model()
        print(trainer.offloaded.report())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder with the model")
    parser.add_argument("--data", type=Path, required=True, help="a file of JSON lines")
    parser.add_argument(
        "--nvme", type=Path, nargs="+", required=True, help="a directory on each local SSD"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the tuned model")
    parser.add_argument("--host-memory", default="8GiB", help="the budget")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=1024, help="most tokens in a row")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
