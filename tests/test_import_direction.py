"""Imports point one way, and private names of torch stay in `overlap_core/inductor/`."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import grimp
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LAYERS = (
    ("errors", "config", "hookspecs", "registry", "host", "session"),
    ("graph",),
    ("skeleton", "costs"),
    ("placement", "ranks", "replay"),
    ("outcome", "views", "verdicts", "coalescing", "pipeline", "following", "simulation"),
    ("inductor",),
    ("report", "view", "traces", "doctor", "cli"),
    ("testing",),
)
"""Parts of the package from the bottom up. A part imports what is below it, or beside it."""

DATA_TYPES = {
    "overlap_core.config",
    "overlap_core.costs.types",
    "overlap_core.errors",
    "overlap_core.graph.nodes",
    "overlap_core.hookspecs",
    "overlap_core.placement.plan",
    "overlap_core.ranks.votes",
    "overlap_core.replay.types",
    "overlap_core.skeleton.entries",
}
"""Modules that hold frozen data only: hooks speak in these, so every layer may import them."""

ALLOWED_IMPORTS: dict[tuple[str, str], str] = {
    ("overlap_core.cli.demo", "testing"): "the demo runs the test kit's model on real ranks",
}
"""(importer, part of the package) -> why it may go against the direction."""

ALLOWED_PRIVATE_NAMES: dict[tuple[str, str], str] = {}
"""(path in the package, dotted name) -> why it is used outside `inductor/`."""


@pytest.fixture(scope="module")
def imports() -> set[tuple[str, str]]:
    """All (importer, imported) pairs at run time within the package."""
    graph = grimp.build_graph("overlap_core", exclude_type_checking_imports=True, cache_dir=None)
    return {
        (importer, imported)
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
    }


def part_of(module: str) -> str:
    """The part of the package that a module belongs to; "" for the package root itself."""
    return module.split(".")[1] if "." in module else ""


def level_of(part: str) -> int:
    if part.startswith("_"):
        return 0  # a private module of the package root serves the bottom
    levels = [level for level, parts in enumerate(LAYERS) if part in parts]
    assert len(levels) == 1, f"overlap_core.{part} has no place in LAYERS of {__file__}"
    return levels[0]


def is_allowed(importer: str, imported: str) -> bool:
    """Whether an import is one of the reasoned exceptions."""
    return (importer, part_of(imported)) in ALLOWED_IMPORTS


def goes_against(importer: str, imported: str) -> bool:
    """Whether an import goes against the direction."""
    source, target = part_of(importer), part_of(imported)
    if source in ("", target) or imported in DATA_TYPES:
        return False  # the package root is what users import: it may name everything
    if source == "builtin":
        return target not in ("", "registry")  # the registry's functions are public API
    if target == "":
        return source not in ("cli", "testing")
    if target == "builtin":
        return True  # built-in plugins are found by the host, like any other plugin
    return level_of(target) > level_of(source)


def test_imports_point_one_way(imports: set[tuple[str, str]]) -> None:
    wrong = {pair for pair in imports if goes_against(*pair) and not is_allowed(*pair)}
    assert sorted(wrong) == []


def test_parts_beside_each_other_do_not_form_cycles(imports: set[tuple[str, str]]) -> None:
    edges = {
        (part_of(importer), part_of(imported))
        for importer, imported in imports
        if imported not in DATA_TYPES and not is_allowed(importer, imported)
    }
    mutual = {(a, b) for a, b in edges if a < b and a and (b, a) in edges}
    assert sorted(mutual) == []


def test_data_types_import_only_data_types(imports: set[tuple[str, str]]) -> None:
    wrong = {
        (importer, imported)
        for importer, imported in imports
        if importer in DATA_TYPES and imported not in DATA_TYPES
    }
    assert sorted(wrong) == []


def test_every_part_has_a_level(package_root: Path) -> None:
    parts = {
        path.stem
        for path in package_root.iterdir()
        if (path.suffix == ".py" or any(path.glob("*.py"))) and path.stem != "__init__"
    }
    for part in sorted(parts - {"builtin"}):
        level_of(part)


def test_import_exceptions_are_needed(imports: set[tuple[str, str]]) -> None:
    used = {(importer, part_of(imported)) for importer, imported in imports}
    assert sorted(set(ALLOWED_IMPORTS) - used) == [], "delete these from ALLOWED_IMPORTS"


def private_torch_names(tree: ast.AST) -> set[str]:
    """Dotted names below `torch`, up to the first part that starts with one underscore.

    Sees through `import ... as ...` and `from ... import ...`, and reads the strings handed to
    `import_module`. Namespaces of ops (`torch.ops.x.y`) are data, not interfaces of Python.
    """
    return set(filter(None, map(_private_prefix, _torch_names(tree))))


def _private_prefix(name: str) -> str | None:
    parts = name.split(".")
    if parts[0] != "torch" or parts[1:2] == ["ops"]:
        return None
    for end, part in enumerate(parts, start=1):
        if part.startswith("_") and not part.startswith("__"):
            return ".".join(parts[:end])
    return None


def _torch_names(tree: ast.AST) -> Iterator[str]:
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                first = alias.name.split(".")[0]
                aliases[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name
                aliases[alias.asname or alias.name] = name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = _dotted(node)
            if name is not None:
                first, _, rest = name.partition(".")
                yield f"{aliases.get(first, first)}.{rest}"
        elif isinstance(node, ast.Call) and node.args:
            function, argument = node.func, node.args[0]
            called = function.attr if isinstance(function, ast.Attribute) else _dotted(function)
            if called in ("import_module", "__import__") and isinstance(argument, ast.Constant):
                yield str(argument.value)


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return None if before is None else f"{before}.{node.attr}"
    return None


def test_private_names_of_torch_stay_in_inductor(package_root: Path) -> None:
    found = set()
    for path in sorted(package_root.rglob("*.py")):
        where = path.relative_to(package_root).as_posix()
        if where.startswith("inductor/"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {(where, name) for name in private_torch_names(tree)}
    assert sorted(found - set(ALLOWED_PRIVATE_NAMES)) == []
    assert sorted(set(ALLOWED_PRIVATE_NAMES) - found) == [], (
        "delete these from ALLOWED_PRIVATE_NAMES"
    )


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch._inductor.config", {"torch._inductor"}),
        ("from torch import _C", {"torch._C"}),
        ("from torch._inductor import ir", {"torch._inductor"}),
        ("import torch as t\nt._dynamo.reset()", {"torch._dynamo"}),
        (
            "import torch.distributed as dist\ndist._functional_collectives.wait_tensor",
            {"torch.distributed._functional_collectives"},
        ),
        (
            "from torch.distributed import _functional_collectives as fc\nfc.wait_tensor(x)",
            {"torch.distributed._functional_collectives"},
        ),
        ("def f():\n    import torch._inductor", {"torch._inductor"}),
        ("importlib.import_module('torch._inductor')", {"torch._inductor"}),
        ("import torch\ntorch.ops._c10d_functional.wait_tensor", set()),
        ("import torch\ntorch.__version__", set()),
        ("self._parameters; module._private", set()),
    ],
)
def test_private_torch_names(source: str, names: set[str]) -> None:
    assert private_torch_names(ast.parse(source)) == names
