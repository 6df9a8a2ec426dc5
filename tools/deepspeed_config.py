"""DeepSpeed with parameters and optimizer on NVMe or in host memory."""

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


def zero3_on_host(*, lr: float, max_grad_norm: float, largest_parameter: int) -> dict[str, Any]:
    """ZeRO-3 in pinned host memory, for micro-batches of one sequence each and a model whose
    largest parameter has so many elements: buffers are fitted to it.
    """
    pinned = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": lr}},
        "gradient_clipping": max_grad_norm,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": pinned,
            "offload_param": pinned,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": largest_parameter,
            "stage3_prefetch_bucket_size": largest_parameter,
            "stage3_max_live_parameters": 8 * largest_parameter,
            "stage3_max_reuse_distance": 8 * largest_parameter,
            "stage3_param_persistence_threshold": 16384,
        },
    }
