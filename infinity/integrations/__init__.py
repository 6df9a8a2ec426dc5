"""The loops of others, each in a module of its own that is imported by name and only then imports
its framework: ``infinity.integrations.transformers`` (Trainer), ``.trl``, ``.accelerate``,
``.lightning``. They are users of ``infinity.offload``; nothing here is known to the rest.
"""
