"""What torch asks of tensors that has nothing to do with their values, for those whose values are
elsewhere.
"""

from __future__ import annotations

import torch


def _of_tensors(*names: str) -> frozenset[object]:
    return frozenset(getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name))


ABOUT_TENSORS = _of_tensors(
    *("shape", "dtype", "device", "layout", "is_sparse", "is_cuda", "requires_grad", "ndim"),
    *("is_meta", "itemsize", "nbytes", "grad_fn", "is_leaf"),
    *("__len__", "dim", "size", "numel", "element_size", "get_device"),
    *("is_floating_point", "is_complex", "is_inference"),
)
"""Of any."""
ABOUT_GRADIENTS = ABOUT_TENSORS | _of_tensors("grad", "is_quantized", "ndimension")
ABOUT_TILED = ABOUT_TENSORS | _of_tensors("is_quantized", "ndimension")
ABOUT_PARAMETERS = ABOUT_TENSORS | _of_tensors(
    *("grad", "output_nr", "retains_grad", "_version", "grad_dtype"),
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
    *("register_hook", "register_post_accumulate_grad_hook"),
)
