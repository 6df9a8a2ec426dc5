"""The first values of a model: its own, those of files, or its own initialisation's."""
