"""What is trained on which card: sizes by formula, from the memory that is there. Pure."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
BASELINE_BYTES = 16
"""A parameter with everything in device memory: weight 2, gradient 2, master 4, moments 8."""
OFFLOADED_BYTES = 14
"""A parameter in host memory: weight and the rest of the master 4, moments 8, gradient 2."""
NVME_BYTES = 13
"""A parameter whose state is half on NVMe: that half, and room for as much that replaces it."""
HIDING_BYTES = 6
"""A parameter: host memory by which updates of what is there can begin before the step is taken."""
WEIGHT_BYTES = 2
"""A parameter that a model begins with, on the device."""
PEER_BYTES = 20
"""A parameter in host memory with DeepSpeed: weight 2, master 4, moments 8, gradients 2 and 4."""
_WITHIN_A_BLOCK = 40
"""Values a token and unit of width that the backward pass of one block has at once."""
_LOSS_BYTES = 14
"""A logit: 16 bits, and as float32 itself, its softmax and its gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The shape of the models, all in 16 bits, and how long is measured.

    ``host_tokens``: of a step, by piece. ``rows``: tokens whose logits are in memory at once.
    ``device_memory``: budget of what is offloaded; ``device_reserve`` and ``host_reserve``: what
    libraries and the rest of a process need. ``large_parameters``: those of the model that does
    not fit. ``rounds`` at most, of ``steps`` timed each; ``bits_steps`` are compared bit by bit.
    """

    width: int
    vocabulary: int
    sequence: int
    rows: int
    most_parameters: int
    large_parameters: int
    host_tokens: dict[str, int]
    device_memory: int
    device_reserve: int
    host_reserve: int
    link_bytes: int
    rounds: int
    steps: int
    bits_steps: int

    @property
    def largest_batch(self) -> int:
        """Tokens."""
        return max(self.host_tokens.values())

    def parameters(self, depth: int) -> int:
        """Of a model so deep."""
        block = 12 * self.width**2 + 13 * self.width
        outside = (2 * self.vocabulary + self.sequence + 2) * self.width
        return depth * block + outside

    def activation_bytes(self, depth: int, tokens: int) -> int:
        """What a step has in device memory beside weights and gradients, with recomputation."""
        within = (depth + _WITHIN_A_BLOCK) * tokens * self.width * 2
        return within + self.rows * self.vocabulary * _LOSS_BYTES

    def depth_for(self, parameters: int) -> int:
        """The least that has so many parameters."""
        return next(depth for depth in range(1, 10_000) if self.parameters(depth) >= parameters)

    def depth_within(
        self,
        device_bytes: int,
        host_bytes: int,
        *,
        bytes_on_host: int = OFFLOADED_BYTES,
        disk_bytes: int | None = None,
    ) -> int:
        """The deepest model that trains in device memory, beside one that is offloaded to a host
        with so much memory, or half to disks with so much room. Raises ``ValueError`` if none does.
        """

        def fits(depth: int) -> bool:
            parameters = self.parameters(depth)
            beside = self.device_memory + self.device_reserve
            on_device = BASELINE_BYTES * parameters + beside
            on_device += self.activation_bytes(depth, self.largest_batch)
            on_host = bytes_on_host * parameters + self.host_reserve
            on_disk = 0 if disk_bytes is None else NVME_BYTES * parameters - disk_bytes
            return on_device <= device_bytes and on_host <= host_bytes and on_disk <= 0

        most = self.depth_for(self.most_parameters)
        depth = max((depth for depth in range(1, most + 1) if fits(depth)), default=0)
        if not depth:
            raise ValueError(
                f"no model of width {self.width} fits {device_bytes} bytes of device memory, "
                f"{host_bytes} of host memory and the disks; free some of these"
            )
        return depth

    def device_memory_beside(self, depth: int, tokens: int, device_bytes: int) -> int:
        """The largest budget that leaves room for the activations of such a step, and for the
        values that a model so deep begins with.
        """
        begun = WEIGHT_BYTES * self.parameters(depth)
        beside = self.activation_bytes(depth, tokens) + self.device_reserve
        return max(self.device_memory, device_bytes - begun - beside)


FULL = Scale(
    width=4096,
    vocabulary=32000,
    sequence=2048,
    rows=4096,
    most_parameters=7_400_000_000,
    large_parameters=12_000_000_000,
    host_tokens={"host32k": 32768, "host16k": 16384, "host8k": 8192},
    device_memory=4 * GIB,
    device_reserve=5 * GIB,
    host_reserve=12 * GIB,
    link_bytes=256 << 20,
    rounds=3,
    steps=3,
    bits_steps=3,
)
SMALL = Scale(
    width=128,
    vocabulary=256,
    sequence=32,
    rows=32,
    most_parameters=900_000,
    large_parameters=1_500_000,
    host_tokens={"host32k": 128, "host16k": 64, "host8k": 32},
    device_memory=4 << 20,
    device_reserve=1 << 20,
    host_reserve=16 << 20,
    link_bytes=1 << 20,
    rounds=2,
    steps=1,
    bits_steps=2,
)
SCALES = {"full": FULL, "small": SMALL}
SMALL_DEVICE_BYTES = 24 << 20
"""What a CPU, which has no memory of its own, is taken to have."""
