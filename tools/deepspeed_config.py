"""DeepSpeed with parameters and optimizer on NVMe, configured as its documentation advises."""

from __future__ import annotations

from typing import Any


def zero3_on_nvme(folder: str, *, batch: int, max_grad_norm: float | None) -> dict[str, Any]:
    """ZeRO-3 whose swap files are in ``folder``, for micro-batches of ``batch``."""
    path = {"device": "nvme", "nvme_path": folder}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "bf16": {"enabled": True},
        "zero_force_ds_cpu_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 5e7,
            "offload_optimizer": path
            | {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True},
            "offload_param": path | {"buffer_count": 40, "buffer_size": 1e8},
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 1,
            "overlap_events": True,
        },
    }
    if max_grad_norm:
        config["gradient_clipping"] = max_grad_norm
    return config
