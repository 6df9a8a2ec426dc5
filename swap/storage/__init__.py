"""Bytes on SSDs: directories, extents in them, and the state of subgroups over both tiers."""
