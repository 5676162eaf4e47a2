"""The hooks' names, arguments and docstrings are the contract that plugins are written to."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pluggy
import pytest

from overlap_core import hookspecs

# Name, arguments, and whether the first answer counts.
HOOKS = {
    "overlap_register_ops": (["registry"], False),
    "overlap_classify_node": (["node"], True),
    "overlap_materialize_inputs": (["op_name", "args", "kwargs"], True),
    "overlap_realize_tensor": (["spec"], True),
    "overlap_measure_cost": (["request"], True),
    "overlap_choose_mode": (["votes"], True),
    "overlap_adjust_plan": (["plan", "graph"], False),
    "overlap_report_section": (["report"], False),
}
PARTS = ("When:", "Arguments:", "Return, and what None means:", "Order:", "Must not:", "Added in:")


def test_the_hooks_are_those_of_the_design() -> None:
    manager = pluggy.PluginManager("overlap_core")
    manager.add_hookspecs(hookspecs)
    assert {name for name in vars(manager.hook) if not name.startswith("_")} == set(HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_arguments_and_first_result(name: str) -> None:
    arguments, firstresult = HOOKS[name]
    function = getattr(hookspecs, name)
    assert list(inspect.signature(function).parameters) == arguments
    assert function.overlap_core_spec["firstresult"] is firstresult


@pytest.mark.parametrize("name", HOOKS)
def test_docstring_has_the_six_parts_in_order(name: str) -> None:
    doc = inspect.getdoc(getattr(hookspecs, name))
    assert doc is not None
    lines = doc.splitlines()
    heads = [line for line in lines if line.startswith(PARTS)]
    assert [head.partition(":")[0] + ":" for head in heads] == list(PARTS)
    assert heads[-1] == "Added in: 0.1"
    arguments, _ = HOOKS[name]
    for argument in arguments:
        assert any(line.strip().startswith(f"{argument}:") for line in lines)


def test_hookspecs_import_nothing_of_ours() -> None:
    """Loaded alone from its file, since a package's `__init__` would import the rest."""
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('alone', {hookspecs.__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print([n for n in sys.modules if n.split('.')[0] in ('overlap_core', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
