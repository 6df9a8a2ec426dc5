"""Models that are named and not given: made without their weights, which are streamed in later.

Loading them first, as a trainer does, would take memory for the whole model, beside the budget.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import huggingface_hub
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from infinity.integrations.transformers.model_files.placeholders import (
    REMEDY,
    put_placeholders,
    take_placeholders,
)
from infinity.values.initial.wrapped import WeightsOf

_BY_NAME = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer")
"""Trainers of TRL that take a language model by its name, and how its options reach them."""
_WITH_REFERENCE = ("DPOTrainer", "KTOTrainer")
"""Those that load the same model once more, as the reference."""
_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
_DRAWN = ("gaussian", "orthogonal")
"""First values of adapters that are drawn, and have nothing to do with those of the model."""
_REFUSED = ("quantization_config", "device_map", "gguf_file", "subfolder", "variant")
_FINDING = ("revision", "cache_dir", "force_download", "local_files_only", "token")
"""Options that say where the files are."""
_MAKING = ("attn_implementation", "experts_implementation")
"""Those that say how the model computes."""
_LOADING = (
    *_FINDING,
    *_MAKING,
    *("dtype", "torch_dtype", "trust_remote_code", "code_revision"),
    *("low_cpu_mem_usage", "use_safetensors", "weights_only", "disable_mmap"),
)
"""Those that are not of its configuration; TRL knows ``dtype`` alone, and no ``torch_dtype``."""


class Streamed:
    """The models of a trainer that were named, and where the values of each come from, whatever
    the trainer puts around it. One that was not named has nothing to do with this.
    """

    def __init__(self) -> None:
        self._models: list[tuple[nn.Module, Path]] = []
        self._plain: tuple[nn.Module, Path] | None = None
        self._wrapped: tuple[Mapping[nn.Parameter, str], WeightsOf] | None = None

    def make(self, folder: Path, options: Mapping[str, Any], name: str) -> Any:
        """A model without values."""
        model = made_of(folder, options)
        model.name_or_path = model.config.name_or_path = name
        model.resize_token_embeddings = MethodType(_resize_token_embeddings, model)
        self._models.append((model, folder))
        return model

    def prepare_to_wrap(self) -> None:
        """Let adapters be put around the model, until ``complete``."""
        ((model, folder),) = self._models
        self._plain = (copy.deepcopy(model), folder)  # on meta, where it takes no memory
        put_placeholders(model)

    def complete(self, model: nn.Module) -> None:
        """``model`` is what the trainer has made. Raises ``ValueError`` naming what would have
        needed the weights to be made.
        """
        if self._plain is not None:
            names = take_placeholders(model)
            self._wrapped = (names, WeightsOf(*self._plain, names))

    def weights_for(self, model: nn.Module) -> str | os.PathLike[str] | None:
        """The values of ``model``; None: it has its own."""
        own = set(model.parameters())
        if self._wrapped is not None and not own.isdisjoint(self._wrapped[0]):
            return self._wrapped[1]
        for named, folder in self._models:
            if named is model:
                return str(folder)
        if self._models and any(parameter.is_meta for parameter in own):
            raise ValueError(
                f"the trainer put a {type(model).__name__} in the place of the model that was "
                f"given by name, whose weights it cannot be given: {REMEDY}"
            )
        return None


def stream_named(kind: type, given: dict[str, Any]) -> Streamed:
    """Put models without weights in the place of a name in the arguments ``given`` to a trainer of
    the class ``kind``.

    Raises ``ValueError`` for options of a model that cannot be streamed in.
    """
    streamed = Streamed()
    bases = {base.__name__ for base in kind.__mro__}
    if not isinstance(given.get("model"), str) or not bases & {*_BY_NAME}:
        return streamed
    name, adapters = given["model"], given.get("peft_config")
    arguments = given.get("args")
    check_named(arguments, adapters)
    options = dict(getattr(arguments, "model_init_kwargs", None) or {})
    folder = _folder_of(name, options)
    given["model"] = streamed.make(folder, options, name)
    if adapters is not None:
        streamed.prepare_to_wrap()
    elif bases & {*_WITH_REFERENCE} and given.get("ref_model") is None:
        given["ref_model"] = streamed.make(folder, options, name)
    return streamed


def check_named(arguments: Any, adapters: Any) -> None:
    """Raises ``ValueError`` for what needs the weights of a named model when a trainer is made."""
    if getattr(arguments, "precompute_ref_log_probs", False):
        raise ValueError(
            "precompute_ref_log_probs=True needs the weights of the model when the trainer is "
            f"made, and one that is given by name has none before training begins: {REMEDY}"
        )
    begins = getattr(adapters, "init_lora_weights", None)
    if getattr(adapters, "use_dora", False):
        begins = "dora"
    if isinstance(begins, str) and begins not in _DRAWN:
        raise ValueError(
            f"adapters of the kind {begins!r} begin with what is computed from the weights of the "
            f"model, and one that is given by name has none before training begins: {REMEDY}"
        )


def made_of(folder: Path, options: Mapping[str, Any]) -> Any:
    """The language model that ``folder`` describes, its parameters on the meta device; in float32,
    as TRL makes it, unless ``options`` say another dtype. Fields of its configuration may be among
    them, as for ``from_pretrained``.
    """
    for name in _REFUSED:
        if options.get(name) is not None:
            raise _refused(name)
    remote = bool(options.get("trust_remote_code", False))
    given = {name: value for name, value in options.items() if name not in _LOADING}
    config, rest = AutoConfig.from_pretrained(
        folder, trust_remote_code=remote, return_unused_kwargs=True, **given
    )
    dtype = options.get("dtype", "float32")
    if dtype in ("auto", None):
        dtype = AutoConfig.from_pretrained(folder, trust_remote_code=remote).dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    making = {name: options[name] for name in _MAKING if name in options}
    for name, value in rest.items():
        if value is not None and name not in _MAKING:
            raise _refused(name)
    kind = getattr(transformers, (config.architectures or [""])[0], None) or AutoModelForCausalLM
    make = getattr(kind, "_from_config", None) or kind.from_config
    with torch.device("meta"):
        model = make(config, dtype=dtype, **making)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()  # as models that are loaded are


def _resize_token_embeddings(
    model: Any,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Module:
    """That of a model which is given by name: to the size that it has. Raises ``ValueError`` for
    another, whose new rows are computed from the others, or have to be in the files.
    """
    found: Any = model.get_input_embeddings()
    size = wanted = int(found.weight.shape[0])
    embeddings: nn.Module = found
    if new_num_tokens is not None:
        wanted = new_num_tokens
    if pad_to_multiple_of:
        wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
    if wanted != size:
        raise ValueError(
            f"its embeddings, of {size} tokens, cannot be resized to {wanted} (as "
            "chat_template_path= does for a template that adds tokens): new rows are computed from "
            "the weights of the model, and one that is given by name has none before training "
            f"begins: {REMEDY}"
        )
    return embeddings


def _refused(name: str) -> ValueError:
    return ValueError(
        f"model_init_kwargs={{{name!r}: ...}} cannot be honoured with offloading: remove it, or "
        f"{REMEDY}"
    )


def _folder_of(name: str, options: Mapping[str, Any]) -> Path:
    if Path(name).is_dir():
        return Path(name)
    finding = {key: options[key] for key in _FINDING if key in options}
    return Path(huggingface_hub.snapshot_download(name, allow_patterns=_FILES, **finding))
