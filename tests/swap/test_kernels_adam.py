"""The Adam kernel: the same bits whatever runs it, and the numbers of torch.optim."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from swap.adam import AdamHyper
from swap.kernels import adam_step, merge_master, split_master
from swap.processors import available_isas, isa, set_isa, stay_in_background

HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=3)
LAYOUTS = {
    "halves": (torch.bfloat16, torch.int16),
    "copy-bf16": (torch.bfloat16, torch.float32),
    "copy-fp16": (torch.float16, torch.float32),
    "master": (torch.float32, None),
}
GRADS = [torch.float32, torch.bfloat16, torch.float16]
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}

Tensors = dict[str, torch.Tensor | None]


@pytest.fixture(autouse=True)
def fastest_isa_again() -> Iterator[None]:
    yield
    set_isa(None)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(INTEGERS[tensor.element_size()])


def _any_bits(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Elements of all kinds: NaNs, infinities, subnormals and everything between."""
    generator = torch.Generator().manual_seed(seed)
    integer = INTEGERS[dtype.itemsize]
    info = torch.iinfo(integer)
    return (
        torch.randint(info.min, info.max + 1, (n,), generator=generator, dtype=torch.int64)
        .to(integer)
        .view(dtype)
    )


def _normal(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _state(layout: str, grad: torch.dtype, n: int, *, wild: bool = False) -> Tensors:
    make = _any_bits if wild else _normal
    weight, rest = LAYOUTS[layout]
    second = make(n, torch.float32, 4)
    rest_tensor = None
    if rest is torch.int16:
        rest_tensor = _any_bits(n, torch.int16, 2)
    elif rest is not None:
        rest_tensor = make(n, rest, 2)
    return {
        "weight": make(n, weight, 1),
        "rest": rest_tensor,
        "exp_avg": make(n, torch.float32, 3),
        "exp_avg_sq": second if wild else second.square(),
        "grad": make(n, grad, 5),
    }


def _stepped(state: Tensors, hyper: AdamHyper = HYPER, threads: int = 1) -> Tensors:
    after = {name: None if tensor is None else tensor.clone() for name, tensor in state.items()}
    adam_step(**after, hyper=hyper, threads=threads)  # type: ignore[arg-type]
    return after


def _assert_same_bits(one: Tensors, other: Tensors) -> None:
    for name, tensor in one.items():
        twin = other[name]
        if tensor is not None and twin is not None:
            assert torch.equal(_bits(tensor), _bits(twin)), name
        else:
            assert tensor is twin


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad", GRADS, ids=str)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("wild", [False, True], ids=["normal", "any-bits"])
def test_step_gives_the_same_bits_on_every_isa(
    layout: str, grad: torch.dtype, decoupled: bool, wild: bool
) -> None:
    hyper = replace(HYPER, decoupled=decoupled, grad_scale=0.3)
    state = _state(layout, grad, 20_011, wild=wild)
    set_isa("scalar")
    expected = _stepped(state, hyper)
    for name in available_isas():
        set_isa(name)
        _assert_same_bits(_stepped(state, hyper), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_step_gives_the_same_bits_on_any_number_of_threads(layout: str, threads: int) -> None:
    state = _state(layout, torch.bfloat16, 300_001, wild=True)
    _assert_same_bits(_stepped(state, threads=threads), _stepped(state))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", available_isas())
def test_step_in_pieces_at_any_address_gives_the_same_bits(layout: str, name: str) -> None:
    set_isa(name)
    n = 5_000
    state = _state(layout, torch.float16, n, wild=True)
    pieces = {name: None if tensor is None else tensor.clone() for name, tensor in state.items()}
    for begin, end in pairwise([0, 1, 2, 19, 19, 64, 1000, 4097, n]):
        adam_step(
            **{
                name: None if tensor is None else tensor[begin:end]
                for name, tensor in pieces.items()
            },  # type: ignore[arg-type]
            hyper=HYPER,
        )
    _assert_same_bits(pieces, _stepped(state))


def _at_odd_address(tensor: torch.Tensor) -> torch.Tensor:
    memory = bytearray(tensor.numel() * tensor.element_size() + 1)
    moved = torch.frombuffer(memory, dtype=tensor.dtype, offset=1, count=tensor.numel())
    moved.copy_(tensor)
    assert moved.data_ptr() % 2 == 1
    return moved


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", available_isas())
def test_step_at_odd_addresses_gives_the_same_bits(layout: str, name: str) -> None:
    set_isa(name)
    state = _state(layout, torch.float16, 1003)
    odd = {
        name: None if tensor is None else _at_odd_address(tensor) for name, tensor in state.items()
    }
    adam_step(**odd, hyper=HYPER)  # type: ignore[arg-type]
    _assert_same_bits(odd, _stepped(state))


@pytest.mark.parametrize("n", [0, 1, 7, 31, 33])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_over_few_elements_equals_the_head_of_a_longer_one(layout: str, n: int) -> None:
    long = _state(layout, torch.float32, 100)
    short = {name: None if tensor is None else tensor[:n] for name, tensor in long.items()}
    expected = {
        name: None if tensor is None else tensor[:n] for name, tensor in _stepped(long).items()
    }
    _assert_same_bits(_stepped(short), expected)


@pytest.mark.parametrize("grad", GRADS, ids=str)
def test_step_over_halves_equals_the_step_over_their_master(grad: torch.dtype) -> None:
    n = 10_000
    halves = _state("halves", grad, n, wild=True)
    master = dict(halves, weight=torch.empty(n), rest=None)
    merge_master(halves["weight"], halves["rest"], master["weight"])  # type: ignore[arg-type]
    halves, master = _stepped(halves), _stepped(master)
    hi, lo = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
    split_master(master["weight"], hi, lo)  # type: ignore[arg-type]
    _assert_same_bits(halves, dict(master, weight=hi, rest=lo))


@pytest.mark.parametrize("layout", ["copy-bf16", "copy-fp16"])
@pytest.mark.parametrize("wild", [False, True], ids=["normal", "any-bits"])
def test_step_writes_the_copy_as_torch_rounds_the_master(layout: str, wild: bool) -> None:
    # A step of nothing keeps every master, so that the copies are of all kinds of floats.
    hyper = replace(HYPER, lr=0.0)
    n = 1 << 18
    state = _state(layout, torch.float32, n)
    state["rest"] = (_any_bits if wild else _normal)(n, torch.float32, 6)
    after = _stepped(state, hyper)
    copy, master = after["weight"], after["rest"]
    assert copy is not None
    assert master is not None
    expected, nan = master.to(copy.dtype), master.isnan()
    assert torch.equal(_bits(copy)[~nan], _bits(expected)[~nan])
    assert torch.equal(copy.isnan(), nan)


@pytest.mark.parametrize("grad", [torch.bfloat16, torch.float16], ids=str)
def test_step_reads_every_16_bit_gradient_as_torch_does(grad: torch.dtype) -> None:
    every = torch.arange(1 << 16).to(torch.int16).view(grad)
    state = _state("master", grad, 1 << 16)
    _assert_same_bits(
        {k: v for k, v in _stepped(dict(state, grad=every)).items() if k != "grad"},
        {k: v for k, v in _stepped(dict(state, grad=every.float())).items() if k != "grad"},
    )


def test_step_scales_gradients_before_it_uses_them() -> None:
    state = _state("master", torch.float32, 1000)
    grad = state["grad"]
    assert grad is not None
    scaled = _stepped(state, replace(HYPER, grad_scale=0.37))
    before = _stepped(dict(state, grad=grad * 0.37))
    _assert_same_bits(dict(scaled, grad=None), dict(before, grad=None))


def test_step_leaves_the_gradient_alone() -> None:
    state = _state("halves", torch.bfloat16, 1000)
    _assert_same_bits({"grad": _stepped(state)["grad"]}, {"grad": state["grad"]})


def test_step_ignores_how_the_caller_treats_subnormals() -> None:
    state = _state("master", torch.float32, 100_000)
    small = {k: None if v is None else v * 1e-38 for k, v in state.items()}
    expected = _stepped(small, threads=2)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        found = _stepped(small, threads=2)
        assert (torch.tensor([1e-39]) * 1.0).item() == 0.0, "the caller's own mode must come back"
    finally:
        torch.set_flush_denormal(False)
    _assert_same_bits(found, expected)


# torch


def _torch_step(state: Tensors, hyper: AdamHyper, *, fused: bool) -> Tensors:
    weight, exp_avg, exp_avg_sq, grad = (
        state[name].clone()  # type: ignore[union-attr]
        for name in ("weight", "exp_avg", "exp_avg_sq", "grad")
    )
    parameter = torch.nn.Parameter(weight)
    kind = torch.optim.AdamW if hyper.decoupled else torch.optim.Adam
    optimizer = kind(
        [parameter],
        lr=hyper.lr,
        betas=(hyper.beta1, hyper.beta2),
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
        fused=fused,
        foreach=False,
    )
    optimizer.state[parameter] = {
        "step": torch.tensor(float(hyper.step - 1)),
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
    }
    parameter.grad = grad
    optimizer.step()
    return {
        "weight": parameter.detach(),
        "rest": None,
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
        "grad": grad,
    }


def _spacing(values: torch.Tensor) -> torch.Tensor:
    """The ulp of each value, in double."""
    size = values.abs().nan_to_num(0.0, 0.0)
    return torch.nextafter(size, torch.tensor(torch.inf)).double() - size.double()


def _assert_agree(found: Tensors, expected: Tensors, before: Tensors, ulps_of_step: int) -> None:
    """Within two ulps of the largest number that took part, and for weights so many of the step.

    Where terms cancel, the result has fewer digits than what it was computed from.
    """
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        a, b, old = found[name], expected[name], before[name]
        assert a is not None
        assert b is not None
        assert old is not None
        assert torch.equal(a.isnan(), b.isnan()), name
        finite = a.isfinite() & b.isfinite()
        assert torch.equal(a[~finite].nan_to_num(1.0), b[~finite].nan_to_num(1.0)), name
        slack = 2 * torch.maximum(_spacing(b), _spacing(old))
        if name == "weight":
            slack += ulps_of_step * _spacing(b - old)
        assert ((a.double() - b.double()).abs() <= slack)[finite].all(), name


SIZES = {"usual": 1.0, "tiny": 1e-20, "subnormal": 1e-40, "huge": 1e18}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.5), (0.0, 0.0)])
def test_step_agrees_with_torch_within_two_ulps(
    size: str, decoupled: bool, fused: bool, betas: tuple[float, float]
) -> None:
    hyper = replace(HYPER, beta1=betas[0], beta2=betas[1], decoupled=decoupled)
    state = _state("master", torch.float32, 10_007)
    state = {k: None if v is None else v * SIZES[size] for k, v in state.items()}
    # Without fusion torch takes MKL's square roots, which are not always the nearest.
    ulps_of_step = 0 if fused else 4
    for step in (1, 2, 1000):
        hyper = replace(hyper, step=step)
        expected = _torch_step(state, hyper, fused=fused)
        _assert_agree(_stepped(state, hyper), expected, state, ulps_of_step)


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_step_over_special_values_agrees_with_torch(decoupled: bool, weight_decay: float) -> None:
    special = torch.tensor([0.0, -0.0, 1.0, -3e38, 1e-45, torch.inf, -torch.inf, torch.nan])
    grids = torch.cartesian_prod(special, special, special, special)
    state: Tensors = {"rest": None}
    for column, name in enumerate(("weight", "exp_avg", "exp_avg_sq", "grad")):
        state[name] = grids[:, column].contiguous()
    hyper = replace(HYPER, decoupled=decoupled, weight_decay=weight_decay)
    _assert_agree(_stepped(state, hyper), _torch_step(state, hyper, fused=False), state, 4)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in {"AVX2", "AVX512"},
    reason="needs torch with AVX2 or AVX-512 kernels",
)
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_training_gives_the_bits_of_torch_fused(decoupled: bool) -> None:
    hyper = replace(HYPER, decoupled=decoupled)
    state = _state("master", torch.float32, 1 << 16)
    ours, theirs = state, state
    for step in range(1, 6):
        grad = _normal(1 << 16, torch.float32, 100 + step)
        hyper = replace(hyper, step=step)
        ours = _stepped(dict(ours, grad=grad), hyper)
        theirs = _torch_step(dict(theirs, grad=grad), hyper, fused=True)
    _assert_same_bits(ours, theirs)


# threads and processes


@pytest.mark.parametrize("background", [False, True], ids=["team", "pool"])
def test_steps_from_several_threads_at_once_equal_steps_in_turn(background: bool) -> None:
    states = [_state("halves", torch.bfloat16, 150_000 + i) for i in range(4)]
    expected = [_stepped(state) for state in states]
    found: list[list[Tensors]] = [[] for _ in states]

    def work(index: int) -> None:
        if background:
            stay_in_background()
        for _ in range(10):
            found[index].append(_stepped(states[index], threads=3))

    workers = [threading.Thread(target=work, args=(index,)) for index in range(len(states))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for index, results in enumerate(found):
        assert len(results) == 10
        for result in results:
            _assert_same_bits(result, expected[index])


# what can be chosen


def test_isas_end_with_scalar_and_the_first_is_in_use() -> None:
    assert available_isas()[-1] == "scalar"
    assert isa() == available_isas()[0]


def test_set_isa_chooses_and_none_goes_back() -> None:
    set_isa("scalar")
    assert isa() == "scalar"
    set_isa(None)
    assert isa() == available_isas()[0]


def test_set_isa_refuses_a_name_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"'mmx' is not available here; choose from .*scalar"):
        set_isa("mmx")
    assert isa() == available_isas()[0]
