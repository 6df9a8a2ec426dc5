"""Models that are named and not given: made without their weights, which are streamed in later.

Loading them first, as a trainer does, would take memory for the whole model, beside the budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

_BY_NAME = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer")
"""Trainers of TRL that take a language model by its name, and how its options reach them."""
_WITH_REFERENCE = ("DPOTrainer", "KTOTrainer")
"""Those that load the same model once more, as the reference."""
_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
_REFUSED = ("quantization_config", "device_map", "load_in_4bit", "load_in_8bit")


def stream_named(kind: type, given: dict[str, Any]) -> dict[int, str]:
    """Put models without weights in the place of a name in the arguments ``given`` to a trainer of
    the class ``kind``; returns the folder of each model's weights, by its ``id``.

    Raises ``ValueError`` for options of a model that cannot be streamed in.
    """
    bases = {base.__name__ for base in kind.__mro__}
    if not isinstance(given.get("model"), str) or not bases & {*_BY_NAME}:
        return {}
    arguments = given.get("args")
    options = dict(getattr(arguments, "model_init_kwargs", None) or {})
    folder = _folder_of(given["model"], options.pop("revision", None))
    has_adapters = given.get("peft_config") is not None
    given["model"] = made_of(folder, options)
    made = [given["model"]]
    if bases & {*_WITH_REFERENCE} and given.get("ref_model") is None and not has_adapters:
        given["ref_model"] = made_of(folder, options)
        made.append(given["ref_model"])
    return {id(model): str(folder) for model in made}


def made_of(folder: Path, options: Mapping[str, Any]) -> Any:
    """The language model that ``folder`` describes, its parameters on the meta device; in float32,
    as TRL makes it, unless ``options`` say another dtype.
    """
    chosen = dict(options)
    for name in _REFUSED:
        if chosen.pop(name, None) is not None:
            raise ValueError(
                f"model_init_kwargs={{{name!r}: ...}} cannot be honoured with offloading: remove "
                "it, or load the model yourself and pass it instead of its name"
            )
    remote = bool(chosen.pop("trust_remote_code", False))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=remote)
    dtype = chosen.pop("dtype", "float32")
    if dtype in ("auto", None):
        dtype = config.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    kind = getattr(transformers, (config.architectures or [""])[0], None) or AutoModelForCausalLM
    make = getattr(kind, "_from_config", None) or kind.from_config
    with torch.device("meta"):
        model = make(config, dtype=dtype, **chosen)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()  # as models that are loaded are


def _folder_of(name: str, revision: str | None) -> Path:
    if Path(name).is_dir():
        return Path(name)
    return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=_FILES))
