"""Sizes out of Inductor's symbolic world: as text, as hints, never through a guard."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import sympy

from overlap_core.graph.symbols import ExpressionError, parse_expression

if TYPE_CHECKING:
    from collections.abc import Iterable

    from overlap_core.costs import Dim
    from overlap_core.graph import Size

__all__ = ["SizeReader"]


class SizeReader:
    """Reads sizes of one graph and remembers the symbols it met."""

    def __init__(self, sizevars: Any) -> None:
        self._sizevars = sizevars
        self._symbols: dict[str, Any] = {}
        self._texts: dict[Any, Size] = {}
        self._hints: dict[Any, int | None] = {}

    def size(self, value: Any) -> Size:
        """One dimension as an integer or as the text of an expression."""
        if isinstance(value, int):
            return value
        expression = sympy.sympify(value)
        if expression.is_Integer:
            return int(expression)
        text = self._texts.get(expression)
        if text is None:
            for symbol in expression.free_symbols:
                self._symbols[symbol.name] = symbol
            text = self._texts[expression] = _as_text(expression)
        return text

    def sizes(self, values: Iterable[Any]) -> tuple[Size, ...]:
        """A shape."""
        return tuple(self.size(value) for value in values)

    def hint(self, value: Any) -> int | None:
        """The number that this rank saw first, or None; adds no guard."""
        if isinstance(value, int):
            return value
        expression = sympy.sympify(value)
        if expression.is_Integer:
            return int(expression)
        if expression not in self._hints:
            self._hints[expression] = self._ask(expression)
        return self._hints[expression]

    def _ask(self, expression: Any) -> int | None:
        try:
            return int(self._sizevars.optimization_hint(expression, fallback=None))
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError):
            # Without a fallback some releases refuse an unbacked symbol that has no hint.
            return None

    def dims(self, values: Iterable[Any]) -> tuple[Dim, ...]:
        """A shape as it stands in a cost key: symbolic dimensions as ("~", hint)."""
        found: list[Dim] = []
        for value in values:
            size = self.size(value)
            found.append(size if isinstance(size, int) else ("~", self.hint(value)))
        return tuple(found)

    def numel(self, values: Iterable[Any]) -> int | None:
        """Number of elements by hint, or None if a hint is missing."""
        hints = [self.hint(value) for value in values]
        return None if None in hints else math.prod(hint for hint in hints if hint is not None)

    def hints(self) -> dict[str, int | None]:
        """Hints of all symbols met so far, by name."""
        return {name: self.hint(self._symbols[name]) for name in sorted(self._symbols)}


def _as_text(expression: Any) -> str:
    """The expression in the graph file's grammar; what that cannot say keeps its symbols only."""
    text = str(expression)
    try:
        parse_expression(text)
    except ExpressionError:
        names = sorted(symbol.name for symbol in expression.free_symbols)
        return f"{type(expression).__name__}({', '.join(names)})"
    return text
