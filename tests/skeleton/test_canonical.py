"""The canonical labelling against a brute-force oracle, and its pruning on symmetric cases."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_core.graph.symbols import Expression, parse_expression
from overlap_core.skeleton.canonical import _Search, canonical_labels, canonical_sites

NAMES = ("s0", "s1", "s2", "s3", "s4")


def _sites(*texts: str) -> list[Expression]:
    return [parse_expression(text) for text in texts]


def _rename(sites: list[Expression], names: dict[str, str]) -> list[Expression]:
    """Through text and parser, so independent of `serialize`."""
    return _sites(*(re.sub(r"s\d+", lambda m: names[m[0]], str(site)) for site in sites))


def _symbols(sites: list[Expression]) -> list[str]:
    return sorted({symbol for site in sites for symbol in site.symbols})


def _some_renaming_works(left: list[Expression], right: list[Expression]) -> bool:
    old, new = _symbols(left), _symbols(right)
    if len(old) != len(new):
        return False
    renamings = (dict(zip(old, names, strict=True)) for names in itertools.permutations(new))
    return any(_rename(left, renaming) == right for renaming in renamings)


def _expressions(names: tuple[str, ...], max_leaves: int) -> st.SearchStrategy[Expression]:
    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        operators = st.sampled_from(("+", "+", "*", "*", "-", "//", "%"))
        binary = st.tuples(inner, operators, inner)
        return st.one_of(
            binary.map(lambda parts: f"({''.join(parts)})"),
            st.tuples(inner, inner).map(lambda parts: f"Max({parts[0]}, {parts[1]})"),
        )

    leaves = st.sampled_from((*names, *names, "2", "3"))
    texts = st.recursive(leaves, grow, max_leaves=max_leaves)
    # `s0 % (s1 - s1)` and the like divide by a literal zero, and are no expressions.
    return texts.filter(_is_readable).map(parse_expression)


def _is_readable(text: str) -> bool:
    try:
        parse_expression(text)
    except ValueError:
        return False
    return True


small_sites = st.lists(_expressions(NAMES[:3], 4), min_size=1, max_size=2)
larger_sites = st.lists(_expressions(NAMES, 9), min_size=1, max_size=4)


def _check(left: list[Expression], right: list[Expression]) -> None:
    equal = canonical_sites(left) == canonical_sites(right)
    assert equal == _some_renaming_works(left, right), (left, right)


@given(small_sites, small_sites)
def test_equal_if_and_only_if_a_renaming_exists_small(
    left: list[Expression], right: list[Expression]
) -> None:
    _check(left, right)


@given(larger_sites, st.permutations(NAMES), st.data())
def test_equal_if_and_only_if_a_renaming_exists_after_one_change(
    left: list[Expression], names: list[str], data: st.DataObject
) -> None:
    right = _rename(left, dict(zip(NAMES, names, strict=True)))
    assert canonical_sites(left) == canonical_sites(right)
    number = data.draw(st.integers(0, len(right) - 1))
    texts = [str(site) for site in right]
    occurrences = list(re.finditer(r"s\d+", texts[number]))
    if occurrences:
        # One occurrence becomes another symbol: merges two, splits one, or moves a use.
        match = data.draw(st.sampled_from(occurrences))
        name = data.draw(st.sampled_from(NAMES))
        changed = texts[number]
        texts[number] = f"{changed[: match.start()]}{name}{changed[match.end() :]}"
    if all(map(_is_readable, texts)):
        _check(left, _sites(*texts))


@given(larger_sites, st.sampled_from(NAMES), st.sampled_from(NAMES))
def test_merging_two_symbols(sites: list[Expression], kept: str, merged: str) -> None:
    texts = [str(site).replace(merged, kept) for site in sites]
    if all(map(_is_readable, texts)):
        _check(sites, _sites(*texts))


@given(larger_sites)
def test_labels_are_a_numbering_of_the_symbols(sites: list[Expression]) -> None:
    labels = canonical_labels(sites)
    assert sorted(labels) == _symbols(sites)
    assert sorted(labels.values()) == list(range(len(labels)))
    assert canonical_sites(sites) == tuple(site.serialize(labels) for site in sites)
    assert canonical_labels(sites) == labels


@pytest.mark.parametrize("size", [3, 4])
def test_graphs_as_sums_of_products(size: int) -> None:
    """Every graph is one site, `s0*s1 + s1*s2` with an edge a term: the hardest sites there are."""
    names = [f"s{n}" for n in range(size)]
    pairs = [f"{a}*{b}" for a, b in itertools.combinations(names, 2)]
    forms = set()
    for chosen in itertools.product((False, True), repeat=len(pairs)):
        edges = list(itertools.compress(pairs, chosen))
        forms.add(canonical_sites(_sites(" + ".join(names), " + ".join(edges) or "0")))
    assert len(forms) == {3: 4, 4: 11}[size]


# DESIGN, "Fingerprint".


def test_renamed_sums_are_one() -> None:
    one = _sites("s27 + s82", "256", "s27 + s82", "s27")
    assert canonical_sites(one) == canonical_sites(_sites("s27 + s74", "256", "s74 + s27", "s27"))
    assert canonical_sites(one) == canonical_sites(_sites("s1 + s2", "256", "s2 + s1", "s2"))


def test_symbols_of_one_sum_are_told_apart_by_later_use() -> None:
    first = canonical_sites(_sites("s27 + s82", "s27*4", "s82*8"))
    assert first == canonical_sites(_sites("s99 + s3", "s99*4", "s3*8"))
    assert first == canonical_sites(_sites("s3 + s99", "s3*4", "s99*8"))
    assert first != canonical_sites(_sites("s27 + s82", "s27*4", "s27*8"))


def test_use_at_another_position_counts() -> None:
    first = canonical_sites(_sites("s0", "s1", "s0", "s1"))
    assert first == canonical_sites(_sites("s5", "s2", "s5", "s2"))
    assert first != canonical_sites(_sites("s0", "s1", "s1", "s0"))


def test_interchangeable_symbols_give_one_form_either_way() -> None:
    first = canonical_sites(_sites("s27 + s82", "s27*s82", "Max(s82, s27)"))
    assert first == canonical_sites(_sites("s82 + s27", "s27*s82", "Max(s27, s82)"))
    assert first == canonical_sites(_sites("s4 + s9", "s9*s4", "Max(s4, s9)"))


def test_two_symbols_are_not_one() -> None:
    assert canonical_sites(_sites("s0 + s1")) != canonical_sites(_sites("s0 + s0"))
    assert canonical_sites(_sites("s0*s1", "7")) != canonical_sites(_sites("s0*s0", "7"))


def test_no_sites_and_no_symbols() -> None:
    assert canonical_labels([]) == {}
    assert canonical_sites(_sites("3", "4 + 1")) == ("3", "5")


# Symmetry: bounded work, counted in refinements of the colouring.


def _edges(pairs: list[tuple[int, int]]) -> str:
    return " + ".join(f"s{a}*s{b}" for a, b in pairs)


_CYCLE = [(n, (n + 1) % 12) for n in range(12)]
_PETERSEN = [
    *((n, (n + 1) % 5) for n in range(5)),
    *((n, n + 5) for n in range(5)),
    *((n + 5, (n + 2) % 5 + 5) for n in range(5)),
]
_CUBE = [(a, a ^ bit) for a in range(16) for bit in (1, 2, 4, 8) if a < a ^ bit]
_ROOK = [
    (a, b) for a, b in itertools.combinations(range(16), 2) if a // 4 == b // 4 or a % 4 == b % 4
]
_SHRIKHANDE = [
    (a, b)
    for a, b in itertools.combinations(range(16), 2)
    if ((b // 4 - a // 4) % 4, (b - a) % 4) in {(0, 1), (0, 3), (1, 0), (3, 0), (1, 1), (3, 3)}
]


@pytest.mark.parametrize(
    ("text", "most_refinements"),
    [
        (" + ".join(f"s{n}" for n in range(20)), 2),
        ("*".join(f"s{n}" for n in range(40)), 2),
        (f"Max({', '.join(f's{n}' for n in range(20))})", 2),
        ("*".join(f"(s{2 * n} + s{2 * n + 1})" for n in range(6)), 20),
        ("*".join(f"(s{2 * n} + s{2 * n + 1})" for n in range(12)), 40),
        ("*".join(f"(s{2 * n} + 2*s{2 * n + 1})" for n in range(12)), 40),
        ("*".join(f"(s{3 * n}//s{3 * n + 1} + s{3 * n + 2})" for n in range(8)), 40),
        (_edges(_CYCLE), 40),
        (_edges(_PETERSEN), 60),
        (_edges(_CUBE), 60),
        (_edges(_ROOK), 80),
        (_edges(_SHRIKHANDE), 80),
    ],
)
def test_symmetric_sites_need_little_search(text: str, most_refinements: int) -> None:
    sites = _sites(text)
    search = _Search.over(sites)
    labels = search.labels()
    assert search.refinements <= most_refinements
    names = list(labels)
    random.Random(0).shuffle(names)
    renamed = _rename(sites, dict(zip(labels, names, strict=True)))
    assert canonical_sites(renamed) == canonical_sites(sites)


def test_symbols_alone_in_some_site_need_no_search() -> None:
    names = [f"s{n}" for n in range(30)]
    search = _Search.over(_sites(" + ".join(names), *names))
    assert search.labels() == {name: number for number, name in enumerate(names)}
    assert search.refinements == 0


def test_sites_that_refinement_alone_cannot_tell_apart() -> None:
    triangles = [(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3)]
    hexagon = [(n, (n + 1) % 6) for n in range(6)]
    assert canonical_sites(_sites(_edges(triangles))) != canonical_sites(_sites(_edges(hexagon)))
    # Strongly regular with the same parameters.
    assert canonical_sites(_sites(_edges(_ROOK))) != canonical_sites(_sites(_edges(_SHRIKHANDE)))
