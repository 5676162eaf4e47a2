"""Size expressions: grammar, normal form, round trip, evaluation, and refusals."""

from __future__ import annotations

import itertools
import pickle
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_core.errors import OverlapError
from overlap_core.graph.symbols import ExpressionError, parse_expression

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = ("s0", "s1", "u2", "_x.y")

_leaves = st.sampled_from(NAMES) | st.integers(0, 4).map(str)
_exponents = st.sampled_from(("0", "1", "2", "s0"))


def _grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = st.tuples(inner, st.sampled_from((" + ", " - ", "*", "//", " % ")), inner)
    calls = st.tuples(st.sampled_from(("Max", "Min", "FloorDiv", "Mod")), inner, inner)
    return st.one_of(
        binary.map("".join),
        binary.map(lambda parts: f"({''.join(parts)})"),
        inner.map(lambda text: f"-{text}"),
        calls.map(lambda parts: f"{parts[0]}({parts[1]}, {parts[2]})"),
        st.tuples(inner, _exponents).map(lambda parts: f"({parts[0]})**{parts[1]}"),
    )


texts = st.recursive(_leaves, _grow, max_leaves=8)


def _parse(text: str) -> object:
    """The expression, or None for a text that divides by a literal zero."""
    try:
        return parse_expression(text)
    except ExpressionError as error:
        return None if error.expected == "a divisor other than zero" else error


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("s0 + s1", "s1+s0"),
        ("2*(a + b)*c", "c*2*(a + b)"),
        ("2*(a + b)*c", "(b + a)*(c*2)"),
        ("-(a - b)*c", "c*(a - b)*-1"),
        ("3*(a + b)", "a*3 + 3*b"),
        ("a - b", "a + (-1)*b"),
        ("a - (b - c)", "c - b + a"),
        ("a*a*b", "b*a**2"),
        ("a + a + 1 - 3", "2*a - 2"),
        ("(2*a*b)**2", "4*b**2*a**2"),
        ("(a**n)**2", "a**(2*n)"),
        ("a**n*a**(1 - n)", "a"),
        ("(a*b)**n*(b*a)**(2 - n)", "a**2*b**2"),
        ("2**n*2**(3 - n)*a", "8*a"),
        ("a - a", "0"),
        ("0*a", "0"),
        ("a**0", "1"),
        ("1**n", "1"),
        ("(-1)**-3", "-1"),
        ("-7//2", "-4"),
        ("-7 % 3", "2"),
        ("2**3**2", "512"),
        ("-2**2", "-4"),
        ("--a", "a"),
        ("2**-a", "2**(-a)"),
        ("a*-b", "-a*b"),
        ("(a + b)//1", "a + b"),
        ("a % 1", "0"),
        ("a*b//c*d", "((a*b)//c)*d"),
        ("-a//b", "(-a)//b"),
        ("FloorDiv(a, 2)", "a//2"),
        ("Mod(a, 2) + PythonMod(a, 2)", "2*(a % 2)"),
        ("Max(a, b, 1)", "Max(1, b, a, b)"),
        ("Min(a, a)", "a"),
        ("Max(2, 3)", "3"),
        ("f( b,a )", "f(b, a)"),
    ],
)
def test_equal_expressions(left: str, right: str) -> None:
    one, other = parse_expression(left), parse_expression(right)
    assert one == other
    assert hash(one) == hash(other)
    assert one.symbols == other.symbols


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("s0 + s1", "s0 + s0"),
        ("s0 + s1", "s0*s1"),
        ("a//b", "b//a"),
        ("a % b", "a//b"),
        ("f(a, b)", "f(b, a)"),
        ("f(a, b)", "g(a, b)"),
        ("Max(a, b)", "Min(a, b)"),
        ("(a + b)*(c + d)", "a*c + a*d + b*c + b*d"),
        ("-(a//b)", "-a//b"),
        ("a**b", "b**a"),
        ("1", "-1"),
    ],
)
def test_different_expressions(left: str, right: str) -> None:
    assert parse_expression(left) != parse_expression(right)


@given(st.lists(texts, min_size=2, max_size=4), st.sampled_from(("+", "*", "Max")), st.data())
def test_order_of_commutative_operands_does_not_matter(
    operands: list[str], operator: str, data: st.DataObject
) -> None:
    def join(operands: list[str]) -> str:
        if operator == "Max":
            return f"Max({', '.join(operands)})"
        return operator.join(f"({operand})" for operand in operands)

    shuffled = data.draw(st.permutations(operands))
    assert _parse(join(operands)) == _parse(join(shuffled))


@given(texts)
def test_round_trip(text: str) -> None:
    try:
        expression = parse_expression(text)
    except ExpressionError:
        return
    again = parse_expression(str(expression))
    labels = {name: name for name in NAMES}
    assert again == expression
    assert str(again) == str(expression)
    assert again.serialize(labels) == expression.serialize(labels)
    assert again.symbols == expression.symbols


@given(texts, texts)
def test_distinct_labels_serialize_exactly(left: str, right: str) -> None:
    try:
        one, other = parse_expression(left), parse_expression(right)
    except ExpressionError:
        return
    labels = {name: number for number, name in enumerate(NAMES)}
    assert (one.serialize(labels) == other.serialize(labels)) == (one == other)


@given(texts, st.permutations(NAMES))
def test_serialization_depends_on_labels_only(text: str, renamed: list[str]) -> None:
    new = dict(zip(NAMES, renamed, strict=True))
    spaced = text.replace("_x.y", "{3}").replace("u2", "{2}").replace("s1", "{1}")
    try:
        one = parse_expression(text)
        other = parse_expression(spaced.replace("s0", "{0}").format(*renamed))
    except ExpressionError:
        return
    labels: dict[str, str | int] = {"s0": 0, "s1": "1", "u2": 0, "_x.y": "'"}
    moved = {new[name]: label for name, label in labels.items()}
    assert one.serialize(labels) == other.serialize(moved)


@given(texts, st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_evaluates_as_python_does(text: str, values: list[int]) -> None:
    hints = dict(zip(NAMES, values, strict=True))
    python: dict[str, int | Callable[..., int]] = {
        **hints,
        "Max": max,
        "Min": min,
        "FloorDiv": lambda a, b: a // b,
        "Mod": lambda a, b: a % b,
    }
    try:
        expected = eval(text.replace("_x.y", "_x"), {**python, "_x": hints["_x.y"]})
    except ZeroDivisionError:
        return
    expression = parse_expression(text)
    assert expression.evaluate(hints) == expected
    if not expression.symbols:
        assert expression.constant == expression.evaluate({})
    elif expression.constant is None:
        assert expression.evaluate({}) is None


@given(
    st.lists(
        st.tuples(st.sampled_from(("+", "-", "*", "//", "%", "**")), st.booleans()), max_size=5
    ),
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
def test_precedence_is_pythons(operators: list[tuple[str, bool]], numbers: list[int]) -> None:
    text = str(numbers[0])
    for (operator, negative), number in zip(operators, numbers[1:], strict=False):
        text += f" {operator} {'-' if negative and operator != '**' else ''}{number}"
    try:
        expected = eval(text)
    except ZeroDivisionError:
        return
    if isinstance(expected, int):
        assert parse_expression(text).constant == expected


@pytest.mark.parametrize(
    ("text", "hints"),
    [
        ("s0 + s1", {"s0": 1}),
        ("s0*s1", {"s1": 1}),
        ("f(s0)", {"s0": 1}),
        ("1 + 7//s0", {"s0": 0}),
        ("7 % s0", {"s0": 0}),
        ("2**(-s0)", {"s0": 1}),
        ("0**(-s0)", {"s0": 1}),
        ("2**-1", {}),
        ("2**s0", {"s0": 10**30}),
    ],
)
def test_unknown_values_are_none(text: str, hints: dict[str, int]) -> None:
    assert parse_expression(text).evaluate(hints) is None


def test_a_value_of_zero_is_known() -> None:
    assert parse_expression("s0*7").evaluate({"s0": 0}) == 0
    assert parse_expression("s0 - s0").constant == 0
    assert parse_expression("s0").constant is None


def test_constants_and_symbols() -> None:
    assert parse_expression(" 1024 ").constant == 1024
    expression = parse_expression("u10*(s2 + 1)//Max(s2, a.b)")
    assert expression.symbols == ("a.b", "s2", "u10")
    assert expression.constant is None
    assert repr(parse_expression("b+a")) == "Expression('a + b')"


def test_expressions_are_immutable() -> None:
    with pytest.raises(AttributeError):
        parse_expression("s0").text = "s1"  # type: ignore[misc]


def test_serialize_needs_every_label() -> None:
    with pytest.raises(KeyError, match="s1"):
        parse_expression("s0 + s1").serialize({"s0": 0})


@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        ("", 1, "a number, a name"),
        ("s0 +", 5, "a number, a name"),
        ("s0 + * s1", 6, "a number, a name"),
        ("+s0", 1, "a number, a name"),
        ("f()", 3, "a number, a name"),
        ("s0 s1", 4, "an operator"),
        ("1e5", 2, "an operator"),
        ("s0/2", 3, "an operator"),
        ("2 (1)", 3, "the end"),
        ("s0 $", 4, "an operator"),
        ("s0)", 3, "an operator or the end"),
        ("s0, s1", 3, "an operator or the end"),
        ("(s0 + s1", 9, r"'\)'"),
        ("(s0, s1)", 4, r"'\)'"),
        ("f(s0, s1", 9, r"'\)'"),
        ("s0 // 0", 4, "a divisor other than zero"),
        ("s0 % (s1 - s1)", 4, "a divisor other than zero"),
        ("0**-1", 2, "a divisor other than zero"),
        ("Mod(s0)", 7, "two arguments of Mod, got 1"),
        ("9**9**9", 2, "integers of at most"),
        ("1" * 5000, 1, "integers of at most"),
        ("(" * 201 + "s0" + ")" * 201, 201, "at most 200 nested"),
        ("s0" + "//s1" * 300, None, "at most 200 nested"),
        ("**".join(["s0"] * 300), None, "at most 200 nested"),
        ("s0 + " * 3000 + "1", 10_001, "at most 10000 characters"),
    ],
)
def test_refusals(text: str, column: int | None, expected: str) -> None:
    with pytest.raises(ExpressionError, match=f"column .*: expected .*{expected}") as caught:
        parse_expression(text)
    error = caught.value
    assert isinstance(error, ValueError)
    assert isinstance(error, OverlapError)
    assert error.text == text
    assert column in (None, error.column)
    assert len(str(error)) < 250
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_long_flat_texts_are_read() -> None:
    total = parse_expression(" + ".join(f"s{n}" for n in range(1000)))
    assert len(total.symbols) == 1000
    assert parse_expression("-" * 5000 + "s0") == parse_expression("s0")
    assert parse_expression("*".join(["s0"] * 2000)) == parse_expression("s0**2000")


def test_deep_texts_are_read_without_deep_calls() -> None:
    text = "s0"
    for operator, n in itertools.islice(itertools.cycle([("*", 3), ("+", 1)]), 180):
        text = f"({text} {operator} s{n})"
    expression = parse_expression(text)
    assert parse_expression(str(expression)) == expression
    assert expression.evaluate({"s0": 1, "s1": 0, "s3": 1}) == 1
