"""The examples for Hugging Face models, on tiny ones: under a small budget they do what plain
PyTorch does in memory.
"""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import infinity

transformers = pytest.importorskip(
    "transformers", reason="needs transformers: pip install .[examples]"
)

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, SEQUENCE, BATCH = 3, 16, 2
TRAINING = ["--steps", str(STEPS), "--sequence", str(SEQUENCE), "--batch", str(BATCH)]
TEXT = "the quick brown fox jumps over the lazy dog. " * 20
SMALL, EVERYTHING = "12MiB", "1GiB"


def save_model(folder: Path, *, layers: int, tied: bool) -> Path:
    """A Llama with random weights, 1.5 MiB a layer in bfloat16; the MLPs may live on NVMe."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def in_memory(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def run_example(program: str, folder: Path, *arguments: str | Path) -> str:
    """What a program prints; it keeps its state in `folder`/nvme and leaves nothing there."""
    nvme = folder / "nvme"
    nvme.mkdir(exist_ok=True)
    command = [sys.executable, EXAMPLES / program, "--nvme", nvme, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(nvme.iterdir()) == []
    return done.stdout


def rows_after(prefix: str, text: str) -> list[str]:
    return [row.removeprefix(prefix).strip() for row in text.splitlines() if row.startswith(prefix)]


def losses_of(text: str) -> list[float]:
    return [float(row.partition("loss ")[2].partition(",")[0]) for row in rows_after("step ", text)]


def text_file(folder: Path) -> Path:
    (folder / "text.txt").write_text(TEXT)
    return folder / "text.txt"


def loss_of_step(model: Any, step: int) -> torch.Tensor:
    from hf_folder import batch_of_step, encode

    rows = batch_of_step(encode(TEXT, None), step, BATCH, SEQUENCE)
    loss: torch.Tensor = model(input_ids=rows, labels=rows, use_cache=False).loss
    return loss


@pytest.fixture(autouse=True)
def _examples_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def train_under_both(program: str, folder: Path, learning_rate: str) -> dict[str, str]:
    """What a program prints under each budget; its output has the name of the budget."""
    parent = folder.parent
    given: list[str | Path] = ["--model", folder, "--text", text_file(parent), *TRAINING]
    given += ["--learning-rate", learning_rate]
    return {
        budget: run_example(program, parent, *given, "--host-memory", budget, "--output", budget)
        for budget in (SMALL, EVERYTHING)
    }


def rounded(master: torch.Tensor) -> torch.Tensor:
    """The nearest bfloat16, ties away from zero: the half of a master that is kept as the weight.

    `to(torch.bfloat16)` takes ties to even; one element in 100,000 or so is such a tie.
    """
    bits = (master.detach().view(torch.int32) + 0x8000) >> 16
    return bits.to(torch.int16).view(torch.bfloat16)


def clip(parameters: list[Any], max_norm: float) -> None:
    """As `clip_grad_norm_`, with sums in float64. In float32, as torch has them, the norm of these
    gradients is wrong by 1e-6, which moves weights over the edge between two of bfloat16.
    """
    squares = (parameter.grad.double().square().sum().item() for parameter in parameters)
    coefficient = min(1.0, max_norm / (math.sqrt(sum(squares)) + 1e-6))
    for parameter in parameters:
        parameter.grad.mul_(coefficient)


def train_in_memory(folder: Path, learning_rate: float) -> tuple[list[float], Any]:
    """Mixed precision as usual: gradients of bfloat16 weights, torch's AdamW on float32 masters."""
    model = in_memory(folder).train()
    files = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    pairs = list(zip(files.parameters(), model.parameters(), strict=True))
    masters = [master for master, _ in pairs]
    optimizer = torch.optim.AdamW(masters, lr=learning_rate, weight_decay=0.01, fused=True)
    losses = []
    for step in range(STEPS):
        for master, weight in pairs:
            weight.data.copy_(rounded(master))
        loss = loss_of_step(model, step)
        loss.backward()
        losses.append(loss.item())
        for master, weight in pairs:
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        clip(masters, 1.0)
        optimizer.step()
    for master, weight in pairs:
        weight.data.copy_(rounded(master))
    return losses, model


@pytest.mark.proof
@pytest.mark.alone
def test_finetune_exports_what_training_in_memory_gives(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", layers=2, tied=True)
    printed = train_under_both("finetune_hf.py", folder, "1e-3")
    assert rows_after("home in nvme", printed[SMALL]) != ["0 B"]
    assert rows_after("home in nvme", printed[EVERYTHING]) == ["0 B"]
    assert rows_after("step ", printed[SMALL]) == rows_after("step ", printed[EVERYTHING])
    small, large = in_memory(tmp_path / SMALL), in_memory(tmp_path / EVERYTHING)
    assert transformers.AutoConfig.from_pretrained(tmp_path / SMALL).dtype == torch.bfloat16
    assert small.lm_head.weight is small.model.embed_tokens.weight
    for one, other in zip(small.parameters(), large.parameters(), strict=True):
        assert torch.equal(one, other)

    losses, plain = train_in_memory(folder, 1e-3)
    assert losses_of(printed[SMALL]) == pytest.approx(losses, abs=1e-6)
    before = in_memory(folder).state_dict()
    expected = plain.state_dict()
    for name, tuned in small.state_dict().items():
        assert not torch.equal(tuned, before[name]), name
        assert torch.equal(tuned, expected[name]), name


@pytest.mark.proof
@pytest.mark.alone
def test_lora_saves_adapters_that_no_budget_changes(tmp_path: Path) -> None:
    from lora import add_adapters

    folder = save_model(tmp_path / "model", layers=8, tied=False)
    printed = train_under_both("lora.py", folder, "1e-2")
    assert rows_after("home in nvme", printed[SMALL]) != ["0 B"]
    assert rows_after("written per step  ", printed[SMALL]) == ["0 B"]
    assert rows_after("step ", printed[SMALL]) == rows_after("step ", printed[EVERYTHING])
    saved = load_file(tmp_path / SMALL)
    everything = load_file(tmp_path / EVERYTHING)

    torch.manual_seed(0)
    plain = in_memory(folder).train()
    adapters = add_adapters(plain, ["q_proj", "v_proj"], 8, 16.0)
    optimizer = torch.optim.AdamW(adapters.values(), lr=1e-2, fused=True)
    first = {name: p.detach().clone() for name, p in adapters.items()}
    losses = []
    for step in range(STEPS):
        loss = loss_of_step(plain, step)
        loss.backward()
        losses.append(loss.item())
        clip(list(adapters.values()), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert losses_of(printed[SMALL]) == pytest.approx(losses, abs=1e-6)
    assert saved.keys() == everything.keys() == adapters.keys()
    for name, values in saved.items():
        assert torch.equal(values, everything[name]), name
        assert not torch.equal(values, first[name]), name
        assert torch.equal(values, adapters[name]), name


def test_lora_leaves_frozen_weights_as_they_were(tmp_path: Path) -> None:
    from hf_folder import model_without_weights
    from lora import add_adapters, first_values

    folder = save_model(tmp_path / "model", layers=8, tied=False)
    model = model_without_weights(folder, torch.bfloat16)
    adapters = add_adapters(model, ["q_proj", "v_proj"], 8, 16.0)
    for name in ("nvme", "together"):
        (tmp_path / name).mkdir()
    weights = first_values(folder, adapters, tmp_path / "together")
    with infinity.offload(
        model, tmp_path / "nvme", weights=weights, host_memory=SMALL
    ) as offloaded:
        for step in range(STEPS):
            loss_of_step(model, step).backward()
            offloaded.step()
        report = offloaded.report()
        offloaded.export(tmp_path / "after")
    assert report.read_bytes > 0
    assert report.formula_written_bytes == 0
    after: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "after").glob("*.safetensors"):
        after |= load_file(file)
    for name, weight in in_memory(folder).state_dict().items():
        assert torch.equal(after[name], weight), name
    assert all(after[name].any() for name in adapters if name.endswith("lora_b"))


@pytest.mark.proof
@pytest.mark.alone
def test_long_context_has_the_same_losses_and_weights_wherever_activations_are(
    tmp_path: Path,
) -> None:
    folder = save_model(tmp_path / "model", layers=2, tied=True)
    given: list[str | Path] = ["--model", folder, "--text", text_file(tmp_path), "--steps", "3"]
    given += ["--sequence", "96", "--learning-rate", "1e-3", "--host-memory", "32MiB"]
    ways = [["keep"], ["nvme"], ["keep", "--recompute"], ["nvme", "--recompute"]]
    losses, weights = [], []
    for number, way in enumerate(ways):
        output = tmp_path / str(number)
        more: list[str | Path] = ["--output", output, "--activations", *way]
        printed = run_example("long_context.py", tmp_path, *given, *more)
        losses.append(losses_of(printed))
        weights.append(load_file(output / "model.safetensors"))
        assert "peak memory" in printed
    assert len(set(losses[0])) == 3
    assert losses == [losses[0]] * 4
    for others in weights[1:]:
        assert all(torch.equal(value, others[name]) for name, value in weights[0].items())


@pytest.mark.proof
@pytest.mark.alone
def test_inference_generates_the_tokens_of_the_model_in_memory(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", layers=8, tied=False)
    given: list[str | Path] = [
        "--model",
        folder,
        "--prompt",
        "Once",
        "--tokens",
        "12",
        "--host-memory",
        SMALL,
    ]
    printed = run_example("inference.py", tmp_path, *given)
    assert rows_after("in nvme now", printed) != ["0 B"]
    prompt = torch.tensor([list(b"Once")])
    with torch.no_grad():
        expected = (
            in_memory(folder)
            .generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=12,
                do_sample=False,
            )[0, 4:]
            .tolist()
        )
    assert len(set(expected)) > 4
    assert rows_after("tokens", printed) == [" ".join(map(str, expected))]
