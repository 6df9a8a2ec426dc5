"""Options that functions take are read by them: one that is ignored is a promise broken in
silence.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("aio", "swap", "checkpoint", "infinity")

IGNORED = {
    "adapters.py:__call__(strict)": "another name or shape is refused in either case",
    "cuda.py:uses(writes)": "memory is kept for a stream whatever it does to it",
    "streamed.py:_resize_token_embeddings(mean_resizing)": "another size is refused in either case",
    "trainer.py:_load_from_checkpoint(model)": "the model that is offloaded is the one",
    "weight.py:_embedding(norm_type)": "with max_norm alone, which is left to torch",
}


def _ignored(tree: ast.AST) -> Iterator[str]:
    """Arguments with a default that are not read, of functions that do something."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = [node for node in function.body if not isinstance(node, ast.Expr | ast.Raise)]
        if not body and not any(
            isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
            for node in function.body
        ):
            continue
        taken = function.args
        positional = [*taken.posonlyargs, *taken.args]
        options = positional[len(positional) - len(taken.defaults) :]
        options += [
            option
            for option, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True)
            if default is not None
        ]
        names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        for option in options:
            if option.arg not in names and not option.arg.startswith("_"):
                yield f"{function.name}({option.arg})"


def test_every_option_is_read() -> None:
    found = {
        f"{path.name}:{what}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for what in _ignored(ast.parse(path.read_text()))
    }
    assert found == set(IGNORED)
