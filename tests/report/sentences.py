"""Sentences that a module can say, read from its source, and whether somebody said them."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = ["matches", "sentences_of"]

_GAP = "{}"
_LOGGED = ("debug", "info", "warning", "error", "exception", "log")
_LEAST_WORDS = 2


def sentences_of(path: Path) -> dict[str, int]:
    """Texts of two words or more with the line that they are on, `{}` for what is filled in.

    Docstrings and messages of a logger are none, nor are asserts: nobody reads them in a report.
    """
    found: dict[str, int] = {}
    for node in _speaking(ast.parse(path.read_text(encoding="utf-8"))):
        text = _text(node)
        fixed = text.replace(_GAP, " ")
        if len(re.findall(r"[A-Za-z]+", fixed)) >= _LEAST_WORDS and " " in text.strip():
            found.setdefault(text, node.lineno)
    return found


def matches(sentence: str, said: Iterable[str]) -> bool:
    """Whether a sentence is part of anything that was said."""
    pattern = re.compile(".*?".join(map(re.escape, sentence.split(_GAP))), re.DOTALL)
    return any(pattern.search(text) for text in said)


def _speaking(node: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    body = getattr(node, "body", None)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assert) or _is_logged(child):
            continue
        is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        if is_text and isinstance(body, list) and child in body:
            continue  # a docstring, or one of an attribute
        if isinstance(child, ast.JoinedStr) or (
            isinstance(child, ast.Constant) and isinstance(child.value, str)
        ):
            yield child
        if not isinstance(child, ast.JoinedStr):
            yield from _speaking(child)
        else:
            for value in child.values:
                if isinstance(value, ast.FormattedValue):
                    yield from _speaking(value.value)


def _is_logged(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in _LOGGED
    )


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(
        str(value.value) if isinstance(value, ast.Constant) else _GAP for value in node.values
    )
