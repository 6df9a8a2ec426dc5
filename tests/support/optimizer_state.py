"""What a program may do to the state of an optimizer, past its state dict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any


def ways_to_change_state(optimizer: Any) -> list[Callable[[], object]]:
    """All that a program may do to ``optimizer.state``, or put in its place."""
    first = optimizer.param_groups[0]["params"][0]
    return [
        optimizer.state.clear,
        optimizer.state.popitem,
        lambda: optimizer.state.pop(first),
        lambda: optimizer.state.pop(first, None),
        lambda: optimizer.state.update({first: {}}),
        lambda: optimizer.state.setdefault(first, {}),
        lambda: optimizer.state.__setitem__(first, {}),
        lambda: optimizer.state.__delitem__(first),
        lambda: setattr(optimizer, "state", defaultdict(dict)),
    ]
