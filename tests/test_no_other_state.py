"""What changes while a process runs is in `overlap_core/session.py` and nowhere else."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ALLOWED: dict[tuple[str, str], str] = {
    ("overlap_core/inductor/install.py", "compile_fx_module.compile_fx"): (
        "the one patch of torch; what it replaced is in the session"
    ),
    ("overlap_core/inductor/input_kinds.py", "_captured"): (
        "lasts for one call of compile_fx, which takes it back; each thread has its own"
    ),
    ("overlap_core/inductor/order_check.py", "OrderCheck._one_at_a_time"): (
        "a lock; the check that took it gives it back"
    ),
    ("overlap_core/testing/conformance.py", "PluginConformance.ops"): (
        "a default that subclasses replace; never changed"
    ),
    ("overlap_core/testing/recorder.py", "CollectiveRecorder._active"): (
        "a lock; the recorder that took it gives it back"
    ),
}
"""(file, name) -> why it is no state of the process."""

LITERALS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
MAKERS = frozenset(
    (
        *("bytearray", "dict", "list", "set"),
        *("ChainMap", "Counter", "OrderedDict", "UserDict", "UserList", "defaultdict", "deque"),
        *("Queue", "SimpleQueue", "SimpleNamespace", "count", "cycle"),
        *("WeakKeyDictionary", "WeakSet", "WeakValueDictionary"),
        *("Barrier", "Condition", "ContextVar", "Event", "Lock", "RLock", "Semaphore", "local"),
    )
)
CHANGERS = frozenset(
    (
        *("add", "append", "appendleft", "clear", "difference_update", "discard", "extend"),
        *("extendleft", "insert", "intersection_update", "move_to_end", "pop", "popitem"),
        *("popleft", "put", "remove", "reverse", "rotate", "set", "setdefault", "sort"),
        *("symmetric_difference_update", "update"),
    )
)


def state_in(tree: ast.Module) -> set[str]:
    """Names of what a module holds on to and may change.

    Containers, counters, locks and None bound at the top of a module or (None apart) of a class;
    names in capitals are constants unless something in the module changes them; `global`; and
    attributes that are set on modules, classes and functions.
    """
    found = {name for name, value in _bound(tree.body) if _is_state(value) or _is_none(value)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bound = _bound(node.body)
            found |= {f"{node.name}.{name}" for name, value in bound if _is_state(value)}
    changed = set(_changed(tree))
    found = {name for name in found if not _is_constant(name)}
    found |= {name for name in changed if _is_constant(name)}
    return found | set(_rebound(tree))


def _is_constant(name: str) -> bool:
    return name.isupper() or name == "__all__"


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Names that statements bind, also below `if` and `try`, but in no function or class."""
    for node in body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield ast.unparse(target), node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield ast.unparse(node.target), node.value
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
            for part in ("body", "orelse", "finalbody"):
                yield from _bound(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _bound(handler.body)


def _is_state(value: ast.expr) -> bool:
    if isinstance(value, (ast.Tuple, ast.Starred)):
        return any(map(_is_state, ast.iter_child_nodes(value)))  # type: ignore[arg-type]
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in MAKERS
    return isinstance(value, LITERALS)


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _changed(tree: ast.Module) -> Iterator[str]:
    """Names of which something is called or assigned that changes the value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in CHANGERS:
                yield ast.unparse(node.func.value)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield ast.unparse(node.value)
        elif isinstance(node, ast.AugAssign):
            yield ast.unparse(node.target)


def _rebound(tree: ast.Module) -> Iterator[str]:
    """Names under `global`, and attributes assigned to what a module defines or imports."""
    own = {"cls"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            own.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            own |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            name = ast.unparse(node)
            if name.partition(".")[0] in own - {"session"} and not node.attr.startswith("__"):
                yield name


def test_state_is_in_the_session_only(repo_root: Path) -> None:
    paths = [
        path
        for folder in (repo_root / "overlap_core", *repo_root.glob("plugins/*/overlap_*"))
        for path in folder.rglob("*.py")
    ]
    assert len({path.relative_to(repo_root).parts[:2] for path in paths}) > 5
    found = set()
    for path in sorted(paths):
        where = path.relative_to(repo_root).as_posix()
        if where != "overlap_core/session.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {(where, name) for name in state_in(tree)}
    assert sorted(found - set(ALLOWED)) == [], "give it a place in overlap_core/session.py"
    assert sorted(set(ALLOWED) - found) == [], "delete these from ALLOWED"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("seen = set()", {"seen"}),
        ("seen: dict[str, int] = {}", {"seen"}),
        ("a, b = [], 1", {"(a, b)"}),
        ("left = right = []", {"left", "right"}),
        ("last = None", {"last"}),
        ("recent = collections.deque(maxlen=2)", {"recent"}),
        ("if x:\n    seen = []\nelse:\n    other = {}", {"seen", "other"}),
        ("try:\n    pass\nexcept E:\n    seen = []", {"seen"}),
        ("def f():\n    global n\n    n = 1", {"n"}),
        ("class A:\n    serials = itertools.count()", {"A.serials"}),
        ("class A:\n    pass\ndef f():\n    A.n = 1", {"A.n"}),
        ("class A:\n    @classmethod\n    def f(cls):\n        cls.n += 1", {"cls.n"}),
        ("def f():\n    f.calls = []", {"f.calls"}),
        ("import torch\ntorch.x = 1", {"torch.x"}),
        ("def f():\n    f.__doc__ = ''", set()),
        ("KNOWN = {}\ndef f():\n    KNOWN[1] = 2", {"KNOWN"}),
        ("KNOWN = []\ndef f():\n    KNOWN.append(2)", {"KNOWN"}),
        ("from .other import KNOWN\nKNOWN.update(a=1)", {"KNOWN"}),
        ("_KNOWN = {}\ndef f():\n    del _KNOWN[1]", {"_KNOWN"}),
        ("KNOWN = {1: 2}\n__all__ = ['f']", set()),
        ("class A:\n    n: int | None = None\n    m: dict = field(factory=dict)", set()),
        ("name = re.compile('x')\nnames = ('a',)", set()),
        ("def f():\n    seen = set()\n    seen.add(1)\n    self.n = None", set()),
        ("from .session import session\nsession.learned.job = 1", set()),
    ],
)
def test_state_in_a_module(source: str, names: set[str]) -> None:
    assert state_in(ast.parse(source)) == names
