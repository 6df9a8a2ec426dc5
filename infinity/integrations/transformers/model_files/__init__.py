"""The model of a trainer to and from its files: written as ``save_pretrained`` does, read back, and
made by name without its weights, which are streamed in later; adapters of PEFT in each of these.
"""
