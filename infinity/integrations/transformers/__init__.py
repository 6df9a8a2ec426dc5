"""Trainers of transformers, and those that derive from them, within a budget::

    from infinity.integrations.transformers import OffloadTrainer

    trainer = OffloadTrainer(model, args, train_dataset=data, nvme="/mnt/nvme0", host_memory="8GiB")

``OffloadMixin`` does the same for any class that derives from ``transformers.Trainer``.
"""

from infinity.integrations.transformers.arguments import OffloadArguments, OffloadArgumentsMixin
from infinity.integrations.transformers.trainer import OffloadMixin, OffloadTrainer

__all__ = ["OffloadArguments", "OffloadArgumentsMixin", "OffloadMixin", "OffloadTrainer"]
