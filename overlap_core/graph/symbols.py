"""Size expressions: parsing, a normal form, evaluation, and text that depends on labels only.

Two texts that differ only in the order of commutative operands give equal expressions. The normal
form is close to sympy's automatic one (sums and products flattened, like terms and powers
collected, integers folded, an integer distributed over a lone sum) but takes a chain of factors
as a whole, parentheses included, so that it never depends on the order of the operands.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from attrs import field, frozen

from overlap_core.errors import OverlapError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Expression", "ExpressionError", "parse_expression"]

_T = TypeVar("_T")

MAX_TEXT_LENGTH = 10_000
MAX_NESTING = 200
MAX_INTEGER_BITS = 3_000
_NESTING_LIMIT = f"at most {MAX_NESTING} nested operations"
_INTEGER_LIMIT = f"integers of at most {MAX_INTEGER_BITS} bits"

_TOKEN = re.compile(
    r"[ \t\r\n]*(?:(?P<number>[0-9]+)|(?P<call>[A-Za-z_][A-Za-z0-9_.]*)[ \t]*\("
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_.]*)|(?P<operator>\*\*|//|[-+*%(),])|(?P<end>\Z)"
    r"|(?P<unknown>.))",
    re.DOTALL,
)
_PRECEDENCE = {"(": 0, "+": 1, "-": 1, "*": 2, "//": 2, "%": 2, "negate": 3, "**": 4}
_DIVISIONS = {"FloorDiv": "//", "Mod": "%", "PythonMod": "%"}
_COMMUTATIVE = {"Max": max, "Min": min}


class ExpressionError(OverlapError, ValueError):
    """A text is not a size expression; `column` counts from 1, `expected` says what was."""

    def __init__(self, text: str, column: int, expected: str) -> None:
        super().__init__(text, column, expected)
        self.text = text
        self.column = column
        self.expected = expected

    def __str__(self) -> str:
        """Text (shortened), column and what was expected there."""
        shown = self.text if len(self.text) <= 80 else f"{self.text[:77]}..."
        return f"size expression {shown!r}, column {self.column}: expected {self.expected}"


class _BuildError(Exception):
    """A value that cannot be built; the parser adds text and column. The message: the expected."""


@frozen(kw_only=True, eq=False, repr=False)
class Expression:
    """A size over symbols, in normal form. Made by `parse_expression` only.

    Immutable and hashable; equal if and only if the normal forms are. `text` is the normal form
    written out, so it stands for the whole structure in comparisons.
    """

    text: str
    operator: str
    """`#` (an integer), `$` (a symbol), `+`, `*`, `//`, `%` or the name of a function."""
    parts: tuple[Expression, ...] = ()
    """Arguments. Those of `+` are (monomial, integer) pairs, those of `*` (base, exponent)."""
    symbols: tuple[str, ...] = ()
    """The names of all symbols in it, sorted."""
    constant: int | None = None
    """The value of a plain integer; None for everything else."""
    height: int = 1

    def __str__(self) -> str:
        """Readable text that parses back to an equal expression."""
        return self.text

    def __repr__(self) -> str:
        """The text, marked as an expression."""
        return f"Expression({self.text!r})"

    def __eq__(self, other: object) -> bool:
        """Equality of normal forms."""
        return self.text == other.text if isinstance(other, Expression) else NotImplemented

    def __hash__(self) -> int:
        """Hash of the normal form."""
        return hash(self.text)

    def evaluate(self, hints: Mapping[str, int]) -> int | None:
        """The value under `hints`, with Python's integer semantics.

        None (unknown) if a symbol has no hint, a function is opaque, a divisor is zero, a power
        is not an integer or the value is beyond all sizes.
        """
        if self.operator == "$":
            return hints.get(self.text)
        if self.operator == "#":
            return self.constant
        values: list[int] = []
        for part in self.parts:
            value = part.evaluate(hints)
            if value is None:
                return None
            values.append(value)
        if self.operator == "+":
            return sum(a * b for a, b in _pairs(values))
        if self.operator == "*":
            powers = [_integer_power(base, count) for base, count in _pairs(values)]
            known = [power for power in powers if power is not None]
            return math.prod(known) if len(known) == len(powers) else None
        if self.operator in _COMMUTATIVE:
            return _COMMUTATIVE[self.operator](values)
        if self.operator in ("//", "%") and values[1] != 0:
            return values[0] // values[1] if self.operator == "//" else values[0] % values[1]
        return None

    def serialize(self, labels: Mapping[str, str | int]) -> str:
        """Unambiguous text with each symbol replaced by its label.

        Commutative operands are sorted by their own serialized text, so it depends on the
        labelling only, never on names. Under labels that are all distinct, two expressions give
        one text if and only if the renaming that the labels imply makes them equal.

        Raises:
            KeyError: a symbol has no label.
        """
        if self.operator == "$":
            return f"[{labels[self.text]!r}]"
        if self.operator == "#":
            return self.text
        texts = [part.serialize(labels) for part in self.parts]
        if self.operator in ("+", "*"):
            texts = sorted([f"{a}^{b}" for a, b in _pairs(texts)])
        elif self.operator in _COMMUTATIVE:
            texts.sort()
        return f"{self.operator}({','.join(texts)})"


def _pairs(flat: Sequence[_T]) -> Iterator[tuple[_T, _T]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _integer_power(base: int, count: int) -> int | None:
    if abs(base) > 1 and (count < 0 or base.bit_length() * count > MAX_INTEGER_BITS):
        return None
    return None if base == 0 and count < 0 else int(base ** abs(count))


def _node(operator: str, parts: Sequence[Expression], text: str) -> Expression:
    # The height bounds every recursion, also for `a//b//c//...` without parentheses.
    height = 1 + max(part.height for part in parts)
    if height > MAX_NESTING:
        raise _BuildError(_NESTING_LIMIT)
    symbols = tuple(sorted({name for part in parts for name in part.symbols}))
    return Expression(
        text=text, operator=operator, parts=tuple(parts), symbols=symbols, height=height
    )


def _integer(value: int) -> Expression:
    if value.bit_length() > MAX_INTEGER_BITS:
        raise _BuildError(_INTEGER_LIMIT)
    return Expression(text=str(value), operator="#", constant=value)


_ONE = _integer(1)
_MINUS_ONE = _integer(-1)


def _operand(expression: Expression) -> str:
    """Its text, in parentheses where another operator beside it could bind differently."""
    binds = expression.operator in ("+", "*", "//", "%") or expression.text.startswith("-")
    return f"({expression.text})" if binds else expression.text


def _term(monomial: Expression, coefficient: int) -> str:
    """One term of a sum, with the sign in front."""
    sign, size = (" - " if coefficient < 0 else " + "), abs(coefficient)
    if monomial == _ONE:
        return f"{sign}{size}"
    # A product joins its coefficient's chain of factors; `//` and `%` need parentheses there.
    joins = monomial.operator == "*" or coefficient == 1
    text = monomial.text if joins else _operand(monomial)
    return f"{sign}{text}" if size == 1 else f"{sign}{size}*{text}"


def _sum(terms: Mapping[Expression, int]) -> Expression:
    """Normal form of collected terms, whose monomials are neither sums nor integers but 1."""
    kept = sorted(
        ((monomial, c) for monomial, c in terms.items() if c != 0),
        key=lambda term: (term[0] == _ONE, term[0].text),
    )
    if not kept:
        return _integer(0)
    if len(kept) == 1 and kept[0][0] == _ONE:
        return _integer(kept[0][1])
    if len(kept) == 1 and kept[0][1] == 1:
        return kept[0][0]
    parts = [part for monomial, c in kept for part in (monomial, _integer(c))]
    text = "".join(_term(monomial, c) for monomial, c in kept)
    return _node("+", parts, text[3:] if text.startswith(" + ") else f"-{text[3:]}")


def _terms(expression: Expression) -> list[tuple[Expression, int]]:
    if expression.constant is not None:
        return [(_ONE, expression.constant)]
    if expression.operator == "+":
        return [(monomial, c.constant or 0) for monomial, c in _pairs(expression.parts)]
    return [(expression, 1)]


def _add(addends: Sequence[Expression]) -> Expression:
    if len(addends) == 1:
        return addends[0]
    collected: dict[Expression, int] = {}
    for addend in addends:
        for monomial, coefficient in _terms(addend):
            collected[monomial] = collected.get(monomial, 0) + coefficient
    return _sum(collected)


def _split(factor: Expression) -> tuple[int, list[tuple[Expression, Expression]]]:
    """The integer factor and the powers of one factor."""
    terms = _terms(factor)
    if len(terms) > 1:
        return 1, [(factor, _ONE)]
    monomial, coefficient = terms[0]
    if monomial.operator == "*":
        return coefficient, list(_pairs(monomial.parts))
    return coefficient, [] if monomial == _ONE else [(monomial, _ONE)]


def _multiply(factors: Sequence[Expression]) -> Expression:
    if len(factors) == 1:
        return factors[0]
    coefficient = 1
    collected: dict[Expression, list[Expression]] = {}
    pending = list(factors)
    while pending:
        for factor in pending:
            integer, powers = _split(factor)
            coefficient *= integer
            for base, exponent in powers:
                collected.setdefault(base, []).append(exponent)
        pending = []
        # A collected power may fall apart again: `(a*b)**n * (a*b)**(2 - n)` is `a**2 * b**2`.
        for base in [base for base, exponents in collected.items() if len(exponents) > 1]:
            exponent = _add(collected[base])
            power = _power(base, exponent)
            if _split(power) == (1, [(base, exponent)]):
                collected[base] = [exponent]
            else:
                del collected[base]
                pending.append(power)
    if coefficient == 0 or not collected:
        return _integer(coefficient)
    monomial = _product([(base, exponents[0]) for base, exponents in collected.items()])
    return _sum({m: c * coefficient for m, c in _terms(monomial)})


def _product(powers: Sequence[tuple[Expression, Expression]]) -> Expression:
    kept = sorted(powers, key=lambda power: power[0].text)
    if len(kept) == 1 and kept[0][1] == _ONE:
        return kept[0][0]
    factors = [_operand(b) if e == _ONE else f"{_operand(b)}**{_operand(e)}" for b, e in kept]
    return _node("*", [part for power in kept for part in power], "*".join(factors))


def _power(base: Expression, exponent: Expression) -> Expression:
    count, integer = exponent.constant, base.constant
    if count == 0 or integer == 1:
        return _ONE
    if count == 1:
        return base
    if count is None:
        return _product([(base, exponent)])
    if integer is not None:
        if integer == 0 and count < 0:
            raise _BuildError("a divisor other than zero")
        if count > 0 and abs(integer) > 1 and integer.bit_length() * count > 2 * MAX_INTEGER_BITS:
            raise _BuildError(_INTEGER_LIMIT)
        if integer == -1:
            return _MINUS_ONE if count % 2 else _ONE
        return _integer(integer**count) if count > 0 else _product([(base, exponent)])
    coefficient, powers = _split(base)
    if powers == [(base, _ONE)] or (coefficient != 1 and count < 0):
        return _product([(base, exponent)])
    distributed = [_power(b, _multiply([e, exponent])) for b, e in powers]
    return _multiply([_power(_integer(coefficient), exponent), *distributed])


def _divide(operator: str, left: Expression, right: Expression) -> Expression:
    dividend, divisor = left.constant, right.constant
    if divisor == 0:
        raise _BuildError("a divisor other than zero")
    if divisor == 1:
        return left if operator == "//" else _integer(0)
    if dividend is not None and divisor is not None:
        return _integer(dividend // divisor if operator == "//" else dividend % divisor)
    return _node(operator, (left, right), f"{_operand(left)}{operator}{_operand(right)}")


def _call(function: str, arguments: Sequence[Expression]) -> Expression:
    if function in _DIVISIONS:
        if len(arguments) != 2:
            raise _BuildError(f"two arguments of {function}, got {len(arguments)}")
        return _divide(_DIVISIONS[function], *arguments)
    if function in _COMMUTATIVE:
        arguments = sorted(set(arguments), key=str)
        integers = [value for a in arguments if (value := a.constant) is not None]
        if len(integers) == len(arguments):
            return _integer(_COMMUTATIVE[function](integers))
        if len(arguments) == 1:
            return arguments[0]
    return _node(function, arguments, f"{function}({', '.join(map(str, arguments))})")


@frozen(kw_only=True)
class _Chain:
    """An operand that may still grow: parts to be added, or to be multiplied.

    Chains grow in place, so that a long sum or product is put in normal form once.
    """

    parts: list[Expression]
    is_sum: bool = False

    @property
    def value(self) -> Expression:
        return _add(self.parts) if self.is_sum else _multiply(self.parts)

    def extend(self, other: _Chain, *, is_sum: bool) -> _Chain:
        chain = self if self.is_sum == is_sum else _Chain(parts=[self.value], is_sum=is_sum)
        chain.parts.extend(other.parts if other.is_sum == is_sum else [other.value])
        return chain


@frozen(kw_only=True)
class _Pending:
    """An operator, or an open parenthesis (of a call, if `function`), without its right side."""

    operator: str
    column: int
    function: str = ""
    arguments: list[Expression] = field(factory=list)


class _Parser:
    """Operator precedence with explicit stacks, so that nested text needs no nested calls.

    Source: Dijkstra's shunting-yard algorithm (1961).
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._column = 1
        self._operands: list[_Chain] = []
        self._pending: list[_Pending] = []

    def parse(self) -> Expression:
        starts = True
        try:
            for match in _TOKEN.finditer(self._text):
                kind = match.lastgroup or ""
                self._column = match.start(kind) + 1
                step = self._start_operand if starts else self._end_operand
                starts = step(kind, match[kind])
            return self._operands.pop().value
        except _BuildError as error:
            raise ExpressionError(self._text, self._column, str(error)) from None

    def _start_operand(self, kind: str, token: str) -> bool:
        """Take a token where an operand has to start; True if that is still so after it."""
        if kind == "number":
            if len(token) > MAX_INTEGER_BITS // 4:  # before int(), which has a limit of its own
                raise _BuildError(_INTEGER_LIMIT)
            self._push(_integer(int(token)))
        elif kind == "name":
            self._push(Expression(text=token, operator="$", symbols=(token,)))
        elif token == "-":
            self._pending.append(_Pending(operator="negate", column=self._column))
        elif token == "(" or kind == "call":
            if sum(pending.operator == "(" for pending in self._pending) >= MAX_NESTING:
                raise _BuildError(_NESTING_LIMIT)
            function = token if kind == "call" else ""
            self._pending.append(_Pending(operator="(", column=self._column, function=function))
        else:
            raise _BuildError("a number, a name, '-' or '('")
        return kind not in ("number", "name")

    def _end_operand(self, kind: str, token: str) -> bool:
        """Take a token right after an operand; True if an operand has to start after it."""
        if kind not in ("operator", "end") or token == "(":
            raise _BuildError("an operator, ')' or the end")
        column = self._column
        self._reduce(_PRECEDENCE.get(token, 1) + (token == "**"))  # `**` binds to the right
        self._column = column
        if token in _PRECEDENCE:
            self._pending.append(_Pending(operator=token, column=column))
            return True
        opened = self._pending[-1] if self._pending else None
        if opened is None:
            if kind != "end":
                raise _BuildError("an operator or the end")
        elif kind == "end" or (token == "," and not opened.function):
            raise _BuildError("')'")
        elif opened.function:
            opened.arguments.append(self._operands.pop().value)
            if token == ")":
                self._push(_call(opened.function, opened.arguments))
        if token == ")":
            self._pending.pop()
        return token == ","

    def _push(self, expression: Expression) -> None:
        self._operands.append(_Chain(parts=[expression]))

    def _reduce(self, precedence: int) -> None:
        """Apply the pending operators that bind at least as tightly, up to a parenthesis."""
        while self._pending and _PRECEDENCE[self._pending[-1].operator] >= precedence:
            pending = self._pending.pop()
            self._column = pending.column
            right = self._operands.pop()
            left = None if pending.operator == "negate" else self._operands.pop()
            self._operands.append(_apply(pending.operator, left, right))


def _apply(operator: str, left: _Chain | None, right: _Chain) -> _Chain:
    if operator in ("negate", "-"):
        right = _Chain(parts=[_MINUS_ONE]).extend(right, is_sum=False)
    if left is None:
        return right
    if operator in ("+", "-", "*"):
        return left.extend(right, is_sum=operator != "*")
    if operator == "**":
        return _Chain(parts=[_power(left.value, right.value)])
    return _Chain(parts=[_divide(operator, left.value, right.value)])


@lru_cache(maxsize=8192)
def parse_expression(text: str) -> Expression:
    """The expression that `text` writes, in normal form; the last few thousand are kept.

    Integers, symbols, `+ - * // % **`, unary minus, parentheses and calls, with Python's
    precedence. `FloorDiv(a, b)` is `a // b`, `Mod` and `PythonMod` are `%`; `Max` and `Min` are
    commutative; any other function is opaque.

    Raises:
        ExpressionError: the text breaks the grammar, divides by a literal zero, or is too long,
            too deeply nested or about too large an integer to be a size.

    Source: the printed form and the automatic simplification of sympy.
    """
    if len(text) > MAX_TEXT_LENGTH:
        raise ExpressionError(text, MAX_TEXT_LENGTH + 1, f"at most {MAX_TEXT_LENGTH} characters")
    return _Parser(text).parse()
