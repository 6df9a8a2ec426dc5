"""Where the state of an ``OffloadedAdamW`` lives: host memory, NVMe, and the slots between."""
