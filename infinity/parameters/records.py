"""What a model consists of: its parameters as records, and what it asks of a budget. Reads the
model, changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from infinity.parameters.compiled import compiled_blocks
from infinity.parameters.partition import Cut, Share, partition
from infinity.parameters.shared_memory import check_sharing
from swap.plain import check_memory, reach_bytes
from swap.plan.layout import ParameterSpec, pad

ALWAYS_ON_HOST_ELEMENTS = 16 * 1024
"""Parameters of up to this many elements (norms, biases) always stay in memory with their state."""

TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One distinct parameter: where it came from, and what it is while offloaded (``spec``).

    ``shape`` is that of the whole; of its elements, in a row, this rank keeps ``spec.numel`` from
    ``first`` on, see ``cut``.
    """

    parameter: nn.Parameter
    spec: ParameterSpec
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    kind: type[nn.Parameter]
    cut: Cut
    first: int = 0
    stride: tuple[int, ...] | None = None
    """Its strides where it came, if they are those of a permutation; None: contiguous."""

    @property
    def index(self) -> int:
        return self.spec.index

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def who(self) -> tuple[str, bool]:
        """Its name, and whether it is a tile of a weight: what is said of one without values."""
        return self.name, "tile_of" in vars(self.parameter)

    @property
    def numel(self) -> int:
        """Elements of the whole parameter, on whichever rank they are."""
        return self.cut.numel

    @property
    def weight_bytes(self) -> int:
        """Those of the whole parameter."""
        return self.numel * self.spec.dtype.itemsize

    @property
    def is_partitioned(self) -> bool:
        return not self.cut.is_replicated

    @property
    def longest_spec(self) -> ParameterSpec:
        """The spec of a rank that keeps as much of it as any."""
        if not self.is_partitioned:
            return self.spec
        return replace(self.spec, numel=max(self.cut.lengths))

    @property
    def kept_shape(self) -> torch.Size:
        """The shape of what this rank keeps."""
        return torch.Size([self.spec.numel]) if self.is_partitioned else self.shape


def records_of(
    model: nn.Module, compute_dtype: torch.dtype | None, *, rank: int = 0, world_size: int = 1
) -> list[Record]:
    """A record for each distinct parameter, in the order of ``named_parameters`` (tied ones once,
    first name), of what ``rank`` of ``world_size`` keeps.

    Raises ``ValueError`` or ``TypeError`` naming a parameter that cannot be offloaded.
    """
    check_compute_dtype(compute_dtype)
    named = list(model.named_parameters())
    if not named:
        raise ValueError(f"{type(model).__name__} has no parameters; there is nothing to offload")
    for name, parameter in named:
        check_parameter(name, parameter)
    dtypes = [compute_dtype_of(parameter.dtype, compute_dtype) for _, parameter in named]
    shares = [_share(parameter, dtype) for (_, parameter), dtype in zip(named, dtypes, strict=True)]
    records = []
    for index, (cut, share) in enumerate(zip(partition(shares, world_size), shares, strict=True)):
        name, parameter = named[index]
        spec = ParameterSpec(
            index=index,
            name=name,
            numel=cut.length(rank),
            dtype=dtypes[index],
            trainable=parameter.requires_grad,
            always_on_host=share.always_on_host,
        )
        records.append(
            Record(
                parameter=parameter,
                spec=spec,
                shape=parameter.shape,
                dtype=parameter.dtype,
                device=parameter.device,
                kind=type(parameter),
                cut=cut,
                first=cut.start(rank),
                stride=_permuted_stride(parameter),
            )
        )
    check_sharing(model, named)
    return records


def _permuted_stride(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """Strides of what is dense and not contiguous, such as channels_last."""
    if parameter.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return None
    return parameter.stride()


def _share(parameter: nn.Parameter, dtype: torch.dtype) -> Share:
    numel = parameter.numel()
    return Share(
        numel=numel,
        # Trained elements have a master and moments beside them.
        bytes_per_element=dtype.itemsize + (12 if parameter.requires_grad else 0),
        row=numel // max(1, parameter.shape[0]) if parameter.dim() else 1,
        always_on_host=numel <= ALWAYS_ON_HOST_ELEMENTS,
    )


def check_compute_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"compute_dtype={dtype} is not supported; use torch.bfloat16, torch.float16, "
            "torch.float32, or None to keep each parameter's dtype"
        )


def compute_dtype_of(dtype: torch.dtype, compute_dtype: torch.dtype | None) -> torch.dtype:
    """Only floating-point values are converted, as ``module.to(dtype)`` does."""
    return compute_dtype if compute_dtype is not None and dtype.is_floating_point else dtype


def check_parameter(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(
            f"{name} is uninitialised; run one forward pass before offloading a lazy module"
        )
    if getattr(parameter, "is_offloaded", False):
        raise ValueError(
            f"{name} is offloaded already; leave the first offload block before the next"
        )
    if parameter.is_inference():
        raise ValueError(
            f"{name} was made inside torch.inference_mode(), and changes of such a tensor are not "
            "counted; make or load the model outside of it (torch.no_grad() is right), or give the "
            "module nn.Parameter(parameter.clone()) in its place"
        )
    if type(parameter) is not nn.Parameter and hasattr(parameter, "_local_tensor"):
        raise TypeError(f"{name} is a DTensor; offload it with infinity.OffloadedAdamW instead")
    if parameter.requires_grad and parameter.dtype not in TRAINABLE_DTYPES:
        raise ValueError(
            f"{name} has dtype {parameter.dtype} and requires a gradient; only real "
            f"floating-point parameters ({', '.join(str(dtype) for dtype in TRAINABLE_DTYPES)}) "
            "can be trained: convert it, or call requires_grad_(False)"
        )
    if not parameter.is_meta:
        check_memory(name, parameter)
        if parameter.requires_grad and reach_bytes(parameter) < parameter.nbytes:
            raise ValueError(
                f"{name} is expanded: several of its elements are one in memory, and no "
                "optimizer can update it; give the module nn.Parameter(parameter.detach().clone()) "
                "in its place, or call requires_grad_(False)"
            )
    if not parameter.is_leaf:
        raise ValueError(f"{name} is not a leaf tensor; offload parameters, not results")
    if functions := _own_functions(type(parameter)):
        raise TypeError(
            f"{name} is a {type(parameter).__name__}, whose {functions} would not be asked inside "
            "the block, where parameters have a class of the library; give the module "
            "nn.Parameter(parameter.detach().as_subclass(torch.Tensor).clone(), "
            "parameter.requires_grad) in its place, and compute what that class does in the "
            "module's forward, or in a parametrization"
        )


def _own_functions(kind: Any) -> str | None:
    """By what a class of parameters answers operations of torch in its own way, which would be
    lost without a word.
    """
    tensor: Any = torch.Tensor
    asked = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    if asked not in (tensor.__torch_function__.__func__, nn.Parameter.__torch_function__):
        return "__torch_function__"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return "__torch_dispatch__"
    return None


def least_arena_bytes(model: nn.Module, records: Sequence[Record], *, on_host: bool = True) -> int:
    """Bytes of weights that must fit at once, of those that stay in host memory too if weights are
    computed with elsewhere: two largest modules, or one and all that it lies in,
    which hold theirs while it runs, or a whole block (an element of a ModuleList) and one module
    more, since a checkpointed block keeps its weights until its backward is over, and a compiled
    one needs all of them at once. Of partitioned parameters it is the longest slices that count.
    """
    sizes = {
        id(record.parameter): record.longest_spec.padded_numel * record.spec.dtype.itemsize
        for record in records
        if not (on_host and record.spec.always_on_host)
    }
    return _least_bytes(model, sizes)


def least_gathered_bytes(model: nn.Module, records: Sequence[Record]) -> int:
    """As ``least_arena_bytes``, of the whole of the partitioned parameters."""
    sizes = {
        id(record.parameter): pad(record.numel) * record.spec.dtype.itemsize
        for record in records
        if record.is_partitioned
    }
    return _least_bytes(model, sizes)


def _least_bytes(model: nn.Module, sizes: dict[int, int]) -> int:
    modules = list(model.modules())
    largest = max(_weight_bytes(module, sizes, recurse=False) for module in modules)
    fleeting = {
        id(parameter)
        for module in modules
        if _is_fleeting(module)
        for parameter in module.parameters()
    }
    compiled = {
        id(block): _weight_bytes(block, sizes, recurse=True) for block in compiled_blocks(model)
    }
    blocks = [_block_bytes(block, sizes, fleeting) + largest for block in _blocks(model)]
    block_bytes = max([*blocks, *(nbytes + largest for nbytes in compiled.values())], default=0)
    return max(2 * largest, _nested_bytes(model, sizes, compiled), block_bytes)


def _block_bytes(block: nn.Module, sizes: dict[int, int], fleeting: Set[int]) -> int:
    """Those of ``block`` while it computes: of its ``fleeting`` weights the largest alone, which
    come and go between those that stay, and leave a gap of that size.
    """
    held = {id(parameter): sizes.get(id(parameter), 0) for parameter in block.parameters()}
    gap = max((nbytes for key, nbytes in held.items() if key in fleeting), default=0)
    return sum(nbytes for key, nbytes in held.items() if key not in fleeting) + gap


def _nested_bytes(module: nn.Module, sizes: dict[int, int], known: dict[int, int]) -> int:
    """Those of ``module`` and of the modules within one another in it that have the most; of some
    they are ``known``, by identity.
    """
    if id(module) not in known:
        inner = (_nested_bytes(child, sizes, known) for child in module.children())
        known[id(module)] = _weight_bytes(module, sizes, recurse=False) + max(inner, default=0)
    return known[id(module)]


def _weight_bytes(module: nn.Module, sizes: dict[int, int], *, recurse: bool) -> int:
    return sum(sizes.get(id(p), 0) for p in module.parameters(recurse=recurse))


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Elements of module containers, but for those that are stacks of such elements themselves."""
    for module in model.modules():
        if isinstance(module, _CONTAINERS):
            for child in module.children():
                if not any(_is_stack(inner) for inner in child.modules()):
                    yield child


def _is_stack(module: nn.Module) -> bool:
    """Whether it is a container of several modules of one kind that have parts: layers, experts."""
    if not isinstance(module, _CONTAINERS):
        return False
    kinds = Counter(type(child) for child in module.children() if _has_parts(child))
    return any(count > 1 for count in kinds.values())


def _has_parts(module: nn.Module) -> bool:
    """Whether there are modules within it; its own weights in tiles are none."""
    return any(not _is_fleeting(child) for child in module.children())


def _is_fleeting(module: nn.Module) -> bool:
    return getattr(type(module), "has_fleeting_weights", False)


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
