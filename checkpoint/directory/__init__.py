"""A checkpoint as directories and files: found, owned, locked, replaced, removed."""
