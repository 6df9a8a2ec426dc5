"""Parameters that are no whole vectors: torch's fused AdamW rounds their end otherwise."""

from collections.abc import Iterator

import pytest
import torch

from swap.adam import AdamHyper
from swap.kernels import adam_step

LANES = {"AVX2": 8, "AVX512": 16}
"""Elements of a vector of torch's kernels, by the instructions that they use."""
SIZES = [*range(1, 36), 100, 1001, 8 * 1024 + 5]
STEPS = 8
State = list[torch.Tensor]

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in LANES,
    reason="needs torch with AVX2 or AVX-512 kernels",
)


def _step(state: State, gradient: torch.Tensor, step: int) -> State:
    weight, exp_avg, exp_avg_sq = after = [tensor.clone() for tensor in state]
    hyper = AdamHyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=step)
    adam_step(
        weight=weight, rest=None, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=gradient, hyper=hyper
    )
    return after


def _torch_step(state: State, gradient: torch.Tensor, step: int) -> State:
    weight, exp_avg, exp_avg_sq = after = [tensor.clone() for tensor in state]
    parameter = torch.nn.Parameter(weight)
    parameter.grad = gradient
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, fused=True)
    optimizer.state[parameter] = {
        "step": torch.tensor(float(step - 1)),
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
    }
    optimizer.step()
    return after


def _ulp(values: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(values, torch.tensor(torch.inf)).double() - values.double()


@pytest.fixture(params=[1, 2, 3])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("sizes", [SIZES[:18], SIZES[18:]])
def test_whole_vectors_have_the_bits_of_torch_fused_and_the_rest_is_within_one_ulp(
    sizes: list[int],
) -> None:
    """Both take each step from the same state: what one step rounds otherwise does not spread."""
    differing = 0
    for n in sizes:
        whole = n - n % LANES[torch.backends.cpu.get_cpu_capability()]
        generator = torch.Generator().manual_seed(n)
        gradients = [torch.randn(n, generator=generator) for _ in range(STEPS)]
        state = [torch.randn(n, generator=generator) * 0.1, torch.zeros(n), torch.zeros(n)]
        for step, gradient in enumerate(gradients, 1):
            before, theirs = state, _torch_step(state, gradient, step)
            state = _step(state, gradient, step)
            for old, ours, other in zip(before, state, theirs, strict=True):
                assert torch.equal(ours[:whole], other[:whole]), (n, step)
                largest = torch.stack([old.abs(), ours.abs(), other.abs()]).amax(0)
                apart = (ours.double() - other.double()).abs()
                assert (apart <= _ulp(largest)).all(), (n, step)
                differing += int((ours != other).sum())
    assert differing, "torch rounds everything as we do: the documents may promise that now"
