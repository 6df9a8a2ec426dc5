"""``infinity plan``: what it is asked about, and how it answers; help, version and exit codes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import checkpoint
import infinity
from infinity import cli
from infinity.cli import main
from infinity.commands.contents import tree_lines
from infinity.commands.largest import CANDIDATES, largest
from infinity.commands.waiting import told
from tests.support.models import Stack
from tests.support.scripts import Script

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "dtype": "bfloat16",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "llama"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TINY))
    return path


def test_plan_of_a_folder_with_a_config_is_that_of_its_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(
            LlamaConfig.from_pretrained(folder), dtype=torch.bfloat16
        )
    expected = infinity.plan(model, host_memory="1GiB")
    assert main(["plan", str(folder), "--host-memory", "1GiB"]) == 0
    shown = capsys.readouterr().out
    assert shown == f"LlamaForCausalLM of {folder} in bfloat16\n\n{expected}\n"
    assert main(["plan", str(folder / "config.json"), "--host-memory", "1GiB", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["num_parameters"] == expected.num_parameters
    assert document["least_host_bytes"] == expected.least_host_bytes


def test_plan_of_a_safetensors_file_takes_its_names_for_modules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Stack()
    file = tmp_path / "weights.safetensors"
    save_file(model.state_dict(), file)
    expected = infinity.plan(model, host_memory="1GiB").to_json()
    assert main(["plan", str(file), "--host-memory", "1GiB", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.pop("source") == f"the tensors of {file} in float32"
    assert document == expected


@pytest.mark.parametrize("source", ["a folder", "a number"])
def test_plan_of_inference_is_for_models_without_gradients(
    source: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = str(folder) if source == "a folder" else "7e9"
    arguments = ["plan", given, "--inference", "--host-memory", "8GiB", "--device", "cpu"]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    weights = 2 * document["num_parameters"]  # beside what they are padded with
    assert weights <= sum(document["bytes_by_tier"].values()) <= 1.01 * weights + (1 << 20)
    assert document["written_bytes_per_step"] == document["passes"] == 0
    assert document["read_bytes_per_step"] == document["bytes_by_tier"]["nvme"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "read per pass" in shown
    assert "per step" not in shown


@pytest.mark.parametrize(
    "names",
    [
        *(["type"], ["training", "x.w"], ["forward.weight"], ["parameters.w"]),
        *(["a", "a.b"], ["a.b", "a"], ["a..b"], ["", "."], ["x.keys.weight", "x.items"]),
        *(["0.w", "\u00b2.w"], ["00.w", "0.w"], ["_modules.w"], ["__class__", "T_destination.w"]),
    ],
    ids=" ".join,
)
def test_plan_of_names_that_no_module_gives_counts_their_elements(
    names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({name: torch.zeros(4) for name in names}, file)
    assert main(["plan", str(file), "--host-memory", "1GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_parameters"] == 4 * len(names)


def test_plan_of_names_nested_without_end_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({".".join("a" * 3000): torch.zeros(4)}, file)
    assert main(["plan", str(file), "--host-memory", "1GiB"]) == 1
    assert "2999 modules" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--ranks", "9" * 30], "world_size"),
        (["--passes", "9" * 400], "passes"),
    ],
)
def test_plan_of_arguments_out_of_range_names_them(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "1M", *words]) == 1
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--device", "tpu"], "device='tpu'"),
        (["--activations", "disk"], "activations='disk'"),
        (["--host-memory", "9" * 400], "host_memory"),
        (["--host-memory", "32 gigs"], "host_memory='32 gigs'"),
        (["--device-memory", "0"], "device_memory='0'"),
        (["--max-parameter-bytes", "x"], "max_parameter_bytes='x'"),
        (["--drive-endurance", "x"], "drive_endurance='x'"),
        (["--space", "9" * 400, "--largest"], "--space"),
    ],
)
def test_plan_of_words_that_make_no_sense_is_misuse_and_no_model_that_does_not_fit(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    count = [] if "--largest" in words else ["1M"]
    assert main(["plan", *count, *words]) == 2
    shown = capsys.readouterr()
    assert named in shown.err
    assert shown.out == ""


def test_plan_over_ranks_is_that_of_one_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "7B", "--ranks", "4", "--host-memory", "64GiB", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["world_size"] == 4
    whole = infinity.plan(7 * 10**9, host_memory="64GiB")
    assert document["num_parameters"] == whole.num_parameters
    of_one = sum(document["bytes_by_tier"].values())
    assert of_one < 0.3 * sum(whole.bytes_by_tier.values())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "config.json describes no model"),
        ('{"model_type": "nothing"}', "config.json describes no model"),
        (json.dumps({**TINY, "hidden_size": "wide"}), "config.json describes no model"),
    ],
)
def test_plan_of_a_config_that_is_none_is_refused_by_its_name(
    folder: Path, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    (folder / "config.json").write_text(content)
    assert main(["plan", str(folder)]) == 1
    assert words in capsys.readouterr().err


def test_plan_of_a_folder_without_a_model_says_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(tmp_path)]) == 1
    assert "neither a config.json nor a file of safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["7B", "--largest"]])
def test_plan_of_nothing_and_of_two_things_is_misuse(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    assert "or --largest in its place" in capsys.readouterr().err


def test_largest_model_fits_and_the_next_one_lacks_what_is_named() -> None:
    def planned(count: int) -> infinity.Plan:
        return infinity.plan(count, host_memory="1GiB")

    for space_bytes, lacks in ((None, "host_memory of"), (10**9, "on NVMe")):
        found = largest(planned, space_bytes)
        count = found.plan.num_parameters
        assert found.plan.fits
        assert space_bytes is None or found.plan.nvme_bytes <= space_bytes
        assert lacks in found.lacks
        assert f"{CANDIDATES[CANDIDATES.index(count) + 1]:,}" in found.lacks


def test_largest_model_of_a_machine_without_room_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--largest", "--host-memory", "1MiB"]) == 1
    assert "not even 1,000,000 parameters fit" in capsys.readouterr().err


def test_show_is_a_tree_of_names_with_sums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"model": {"a": torch.zeros(2, 3), "b": {"c": torch.zeros(4)}}, "lr": torch.zeros(())}
    checkpoint.save(state, tmp_path / "run")
    assert main(["show", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.splitlines()[:5] == [
        "model  2 tensors       40 B",
        "  a    float32 2 x 3   24 B",
        "  b    1 tensor        16 B",
        "    c  float32 4       16 B",
        "lr     float32 scalar  4 B",
    ]
    assert main(["show", str(tmp_path / "run"), "--depth", "1"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:-1]] == [
        "model",
        "lr",
    ]
    assert list(tree_lines([])) == []


def test_help_has_examples_that_parse_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["plan"]):
        with pytest.raises(SystemExit) as stopped:
            main([*words, "--help"])
        assert stopped.value.code == 0
        shown = capsys.readouterr().out
        assert "examples:" in shown
        examples = [line.split()[1:] for line in shown.splitlines() if line[:11] == "  infinity "]
        assert len(examples) >= 5
        for example in examples:
            assert cli._arguments().parse_args(example).command == example[0]
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"infinity-offload {infinity.__version__}\n"


def test_output_that_nobody_reads_any_more_is_no_error_message(tmp_path: Path) -> None:
    unread = "import os, runpy; reading, writing = os.pipe(); os.close(reading)\n"
    unread += "os.dup2(writing, 1); runpy.run_module('infinity.cli', run_name='__main__')"
    script = Script(unread, "gc", tmp_path, ends_interpreter=True)
    assert script.end() == ("", "")
    assert script.returncode == cli.UNREAD


def test_interrupted_command_exits_as_shells_expect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "list_tensors", interrupted)
    assert main(["ls", str(tmp_path)]) == cli.INTERRUPTED


def test_work_that_takes_long_is_told_on_standard_error_as_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from threading import Event

    from rich.console import Console

    shown = Event()
    print_line = Console.print

    def printed(console: Console, *parts: object, **options: object) -> None:
        print_line(console, *parts, **options)  # type: ignore[arg-type]
        shown.set()

    monkeypatch.setattr(Console, "print", printed)
    with told("counting [bold]", patience_seconds=0.0):
        assert shown.wait(30)
    with told("never", patience_seconds=1000.0):
        pass
    assert capsys.readouterr().err == "counting [bold] ...\n"


def test_counts_and_options_in_the_wrong_place_say_what_to_write() -> None:
    with pytest.raises(TypeError, match="write 7000000000"):
        infinity.plan(7e9)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"OffloadedAdamW\(model.parameters"):
        infinity.AdamW(Stack().parameters())  # type: ignore[call-arg, arg-type]
