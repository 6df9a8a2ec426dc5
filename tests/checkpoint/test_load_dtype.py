"""`load(dtype=)` converts numbers as they come; `load(strict=False)` allows for what is absent."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkpoint
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def state_of(dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(64, 48, generator=generator, dtype=torch.float64).to(dtype)
    storage = torch.randn(100, generator=generator, dtype=torch.float64).to(dtype)
    return {
        "plain": base,
        "large": base.repeat(300, 2),
        "transposed": base.clone().t(),
        "alias": base,
        "row": base[3],
        "column": base[:, 5],
        "shared": [storage[:40], storage[20:90]],
        "parameter": torch.nn.Parameter(base[:2].clone()),
        "scalar": base[0, 0].clone(),
        "empty": base[:0].clone(),
        "numbers": torch.arange(10),
        "mask": torch.tensor([True, False]),
        "complex": torch.complex(torch.ones(3), torch.zeros(3)),
        "array": np.arange(5.0),
        "text": "as it was",
    }


def assert_cast(found: Any, saved: Any, dtype: torch.dtype) -> None:
    if isinstance(saved, dict):
        assert found.keys() == saved.keys()
        for key, value in saved.items():
            assert_cast(found[key], value, dtype)
    elif isinstance(saved, list):
        for one, other in zip(found, saved, strict=True):
            assert_cast(one, other, dtype)
    elif isinstance(saved, torch.Tensor):
        expected = saved.to(dtype) if saved.is_floating_point() else saved
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
        assert found.stride() == saved.stride()
        assert found.requires_grad == saved.requires_grad
        assert type(found) is type(saved)
    else:
        assert np.array_equal(found, saved)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("saved", FLOATS)
def test_floating_point_numbers_come_in_the_dtype_that_was_asked_for(
    tmp_path: Path, saved: torch.dtype, dtype: torch.dtype
) -> None:
    state = state_of(saved)
    checkpoint.save(state, tmp_path / "step")
    found = checkpoint.load(tmp_path / "step", dtype=dtype)
    assert_cast(found, state, dtype)
    assert found["row"].untyped_storage().data_ptr() == found["plain"].untyped_storage().data_ptr()
    assert found["alias"] is found["plain"]
    found["shared"][0][20:] = 7
    assert bool((found["shared"][1][:20] == 7).all())


def test_stripes_and_selections_convert_too(tmp_path: Path) -> None:
    state = state_of(torch.float32)
    stripes = [tmp_path / "0", tmp_path / "1"]
    for stripe in stripes:
        stripe.mkdir()
    checkpoint.save(state, tmp_path / "step", stripes)
    for only in ("column", ["row", "numbers"], "shared.1"):
        found = checkpoint.load(tmp_path / "step", only, dtype=torch.bfloat16)
        for key, value in found.items():
            assert_cast(value, state[key][-1:] if key == "shared" else state[key], torch.bfloat16)


def test_live_tensors_of_the_dtype_take_converted_numbers(tmp_path: Path) -> None:
    state = state_of(torch.float32)
    checkpoint.save(state, tmp_path / "step")
    live = {
        name: torch.zeros_like(value, dtype=torch.bfloat16)
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    live["column"] = torch.zeros(64, 2, dtype=torch.bfloat16)[:, 1]
    live["numbers"] = torch.zeros(10, dtype=torch.int64)
    checkpoint.load(tmp_path / "step", into=live, dtype=torch.bfloat16)
    for name, value in live.items():
        expected = state[name]
        assert torch.equal(value, expected.to(value.dtype)), name


def test_live_tensors_of_another_dtype_are_refused_untouched(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.ones(4)}, tmp_path / "step")
    live = {"w": torch.zeros(4)}
    with pytest.raises(ValueError, match=r"float32 of shape \(4,\), which comes as torch.bfloat16"):
        checkpoint.load(tmp_path / "step", into=live, dtype=torch.bfloat16)
    assert not live["w"].any()


@pytest.mark.parametrize("other", [torch.int32, torch.bfloat16])
def test_memory_that_is_seen_as_two_dtypes_is_refused_by_name(
    tmp_path: Path, other: torch.dtype
) -> None:
    weight = torch.ones(8)
    checkpoint.save({"w": weight, "bits": weight.view(other)}, tmp_path / "step")
    with pytest.raises(ValueError, match=r"\['bits'\] is .*load it without dtype="):
        checkpoint.load(tmp_path / "step", dtype=torch.float16)
    found = checkpoint.load(tmp_path / "step", only="w", dtype=torch.float16)
    assert torch.equal(found["w"], weight.half())
    if other == torch.int32:
        found = checkpoint.load(tmp_path / "step", dtype=torch.float32)
        assert torch.equal(found["bits"], weight.view(other))


@pytest.mark.parametrize(
    ("dtype", "error"), [("float16", TypeError), (torch.int8, ValueError), (16, TypeError)]
)
def test_what_is_no_floating_point_dtype_is_refused(
    tmp_path: Path, dtype: Any, error: type[Exception]
) -> None:
    checkpoint.save({"w": torch.ones(8)}, tmp_path / "step")
    with pytest.raises(error, match="dtype"):
        checkpoint.load(tmp_path / "step", dtype=dtype)


def test_damage_is_found_before_it_is_converted(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.ones(2048)}, tmp_path / "step")
    (file,) = (tmp_path / "step").glob("*/*.safetensors")
    with file.open("r+b") as data:
        data.seek(5000)
        data.write(b"\xff")
    with pytest.raises(checkpoint.CorruptCheckpointError, match="tensor 'w'"):
        checkpoint.load(tmp_path / "step", dtype=torch.bfloat16)


def test_absent_leaves_stay_as_they_are_where_that_is_allowed(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.ones(3), "step": 5}, tmp_path / "step")
    live: dict[str, Any] = {"a": torch.zeros(3), "b": torch.full((2,), 7.0), "step": 0, "epoch": 9}
    with pytest.raises(ValueError, match="'b'"):
        checkpoint.load(tmp_path / "step", into=live)
    assert not live["a"].any()
    found = checkpoint.load(tmp_path / "step", into=live, strict=False)
    assert found is live
    assert live["a"].sum() == 3
    assert live["b"].sum() == 14
    assert (live["step"], live["epoch"]) == (5, 9)


@pytest.mark.parametrize("saved", [["b"], ["a", "b"], ["b", "other"], ["other"]])
@pytest.mark.parametrize("only", [None, ["a"], ["b", "other"], "*"])
def test_tensor_at_several_keys_takes_the_first_that_is_saved_and_asked_for(
    only: list[str] | str | None, saved: list[str], tmp_path: Path
) -> None:
    values = {name: torch.full((3,), number) for number, name in enumerate("ab", 1)}
    values["other"] = torch.full((2,), 9)
    checkpoint.save({name: values[name] for name in saved}, tmp_path / "step")
    tied, other = torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    live = {"a": tied, "b": tied, "other": other}
    asked = [name for name in live if only in (None, "*") or name in (only or ())]
    found = [name for name in asked if name in saved]
    if not found:
        with pytest.raises(ValueError, match=f"none of the {len({*asked})} tensors of into"):
            checkpoint.load(tmp_path / "step", into=live, strict=False, only=only)
        return
    assert checkpoint.load(tmp_path / "step", into=live, strict=False, only=only) is live
    (expected,) = [values[name] for name in found if name != "other"][:1] or [torch.zeros(3)]
    assert torch.equal(tied, expected.to(tied.dtype))
    assert other.any() == ("other" in found)


def test_leaves_that_are_there_must_fit_however_lenient(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.ones(3), "b": 1}, tmp_path / "step")
    for live, words in (
        ({"a": torch.zeros(4)}, "of shape"),
        ({"b": torch.zeros(1)}, "a plain value"),
        ({"a": 1}, "a tensor there"),
    ):
        with pytest.raises(ValueError, match=words):
            checkpoint.load(tmp_path / "step", into=live, strict=False)


def test_a_tree_that_has_nothing_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint.save({"model": {"a": torch.ones(3)}}, tmp_path / "step")
    with pytest.raises(ValueError, match=r"none of the 1 tensors of into.*'model.a'"):
        checkpoint.load(tmp_path / "step", into={"module.a": torch.zeros(3)}, strict=False)


@pytest.mark.parametrize("root", [{"a": 1}, [1], (1,), OrderedDict(a=1), torch.ones(2)])
def test_nothing_of_a_tree_is_its_empty_container(tmp_path: Path, root: Any) -> None:
    checkpoint.save(root, tmp_path / "step")
    found = checkpoint.load(tmp_path / "step", only="none.*", strict=False)
    assert found is None if isinstance(root, torch.Tensor) else found == type(root)()


def test_numbers_that_torch_does_not_convert_are_refused_by_their_path(tmp_path: Path) -> None:
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    checkpoint.save({"a": torch.ones(2), "b": packed}, tmp_path / "step")
    with pytest.raises(ValueError, match=r"\['b'\] is torch.float4_e2m1fn_x2"):
        checkpoint.load(tmp_path / "step", dtype=torch.float32)
    with pytest.raises(ValueError, match="does not convert"):
        checkpoint.load(tmp_path / "step", dtype=torch.float4_e2m1fn_x2)
    into = {"a": torch.zeros(2), "b": torch.zeros(4)}
    with pytest.raises(ValueError, match=r"into\['b'\] is torch.float4_e2m1fn_x2"):
        checkpoint.load(tmp_path / "step", into=into, dtype=torch.float32)
    assert into["a"].tolist() == [0.0, 0.0], "nothing is written before everything fits"


def test_patterns_may_match_nothing_where_that_is_allowed(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "step")
    with pytest.raises(ValueError, match="matches no name"):
        checkpoint.load(tmp_path / "step", only=["a", "c*"])
    assert list(checkpoint.load(tmp_path / "step", only=["a", "c*"], strict=False)) == ["a"]
