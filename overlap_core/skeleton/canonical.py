"""Canonical labels of symbols: one result for all graphs that differ only in symbol names.

Sorting symbols by name, by hint or by first appearance is not enough: two symbols may first appear
together in `s0 + s1` and be told apart by a later size only, or not at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from overlap_core.graph.symbols import Expression

__all__ = ["canonical_labels", "canonical_sites"]

_MARK = -1
"""Stands for the one symbol whose place in an expression is being described."""


def canonical_labels(sites: Sequence[Expression]) -> dict[str, int]:
    """Labels 0..k-1 of all symbols in `sites`, the sizes of a graph in order.

    The serialized sites under these labels are a canonical form: for two lists of sites they are
    equal if and only if some one-to-one renaming of symbols makes the lists equal. The labels of
    symbols that an automorphism exchanges are arbitrary; the serialized sites are not.

    Source: colour refinement, then individualization with pruning by automorphisms, as in
    B. McKay, "Practical graph isomorphism" (1981), and B. McKay and A. Piperno, "Practical graph
    isomorphism, II" (2014).
    """
    return _Search.over(sites).labels()


def canonical_sites(sites: Sequence[Expression]) -> tuple[str, ...]:
    """`sites`, in order, serialized under their canonical labels."""
    labels = canonical_labels(sites)
    texts = {site: site.serialize(labels) for site in dict.fromkeys(sites)}
    return tuple(texts[site] for site in sites)


@frozen(kw_only=True)
class _Cells:
    """An ordered partition of the symbols that cannot be refined further by looking at sites.

    A symbol's colour is the number of symbols in the cells before its own, so the colours of a
    discrete partition are labels, and a cell of one symbol keeps its colour for good. `certificate`
    is what the partition shows: equal for partitions that a renaming carries into each other, and
    for discrete ones equal only then.
    """

    colours: dict[str, int]
    certificate: tuple[str, ...]


@frozen(kw_only=True)
class _Leaf:
    chosen: tuple[str, ...]
    path: tuple[tuple[str, ...], ...]
    colours: dict[str, int]


@define(kw_only=True)
class _Search:
    """The search tree: a node is the symbols chosen so far, its children choose one more.

    An automorphism here maps every single expression to itself, since expressions are told apart
    by their positions in the list. Distinct expressions in order of first appearance carry all
    that matters: positions are the same under every renaming.
    """

    expressions: tuple[Expression, ...]
    places: dict[str, list[int]]
    """Symbol to the numbers of the expressions that contain it."""
    refinements: int = 0
    """How much was done, for tests of the pruning."""
    _automorphisms: list[dict[str, str]] = field(factory=list)
    _searched: tuple[Expression, ...] = ()
    """Expressions with a symbol that refinement alone leaves open."""
    _first: _Leaf | None = None
    _best: _Leaf | None = None

    @classmethod
    def over(cls, sites: Iterable[Expression]) -> _Search:
        expressions = tuple(dict.fromkeys(sites))
        places: dict[str, list[int]] = {}
        for number, expression in enumerate(expressions):
            for symbol in expression.symbols:
                places.setdefault(symbol, []).append(number)
        return cls(expressions=expressions, places=places)

    def labels(self) -> dict[str, int]:
        # A symbol that is alone in some site is told apart by its places at once.
        colours = _rank(self.places, self.places.__getitem__)
        if not _open_cells(colours):
            return colours
        colours = self._refine(colours).colours
        twins = {s: n for cell in _open_cells(colours) for s, n in self._number_twins(cell)}
        if not twins:
            return colours
        self._searched = tuple(
            e for e in self.expressions if not twins.keys().isdisjoint(e.symbols)
        )
        # Any order among twins gives the same sites, so they need no search.
        cells = self._refine(_rank(colours, lambda s: (colours[s], twins.get(s, 0))))
        self._explore(cells, (), ())
        assert self._best is not None
        return self._best.colours

    def _refine(self, colours: Mapping[str, int]) -> _Cells:
        """Split cells by where their symbols stand in each expression, until nothing splits."""
        self.refinements += 1
        refined = dict(colours)
        while True:
            described: dict[str, tuple[int, tuple[str, ...]]] = {
                symbol: (colour, ()) for symbol, colour in refined.items()
            }
            marked: dict[str, int] = dict(refined)
            for cell in _open_cells(refined):
                for symbol in cell:
                    marked[symbol] = _MARK
                    texts = [self.expressions[n].serialize(marked) for n in self.places[symbol]]
                    marked[symbol] = refined[symbol]
                    described[symbol] = (refined[symbol], tuple(texts))
            split = _rank(refined, described.__getitem__)
            if split == refined:
                break
            refined = split
        certificate = tuple(expression.serialize(refined) for expression in self._searched)
        return _Cells(colours=refined, certificate=certificate)

    def _number_twins(self, cell: Sequence[str]) -> list[tuple[str, int]]:
        """Each symbol of a cell with its number among its twins, which may be exchanged freely."""
        classes: list[list[str]] = []
        for symbol in cell:
            for twins in classes:
                if self._is_automorphism({symbol: twins[0], twins[0]: symbol}):
                    twins.append(symbol)
                    break
            else:
                classes.append([symbol])
        return [(symbol, number) for twins in classes for number, symbol in enumerate(twins)]

    def _is_automorphism(self, moved: Mapping[str, str]) -> bool:
        names = {symbol: symbol for symbol in self.places}
        renamed = {**names, **moved}
        numbers = sorted({number for symbol in moved for number in self.places[symbol]})
        return all(
            self.expressions[n].serialize(names) == self.expressions[n].serialize(renamed)
            for n in numbers
        )

    def _explore(
        self, cells: _Cells, chosen: tuple[str, ...], path: tuple[tuple[str, ...], ...]
    ) -> int:
        """Search below one node; the depth of the node at which the search has to go on."""
        open_cells = _open_cells(cells.colours)
        if not open_cells:
            return self._reach(_Leaf(chosen=chosen, path=path, colours=cells.colours))
        explored: list[str] = []
        siblings: list[_Cells] = []
        for symbol in open_cells[0]:
            if not self._orbit(symbol, chosen).isdisjoint(explored):
                continue
            child = self._refine(_individualize(cells.colours, symbol))
            if any(self._map_sibling(sibling, child) for sibling in siblings):
                continue
            explored.append(symbol)
            siblings.append(child)
            child_path = (*path, child.certificate)
            if self._is_hopeless(child_path):
                continue
            depth = self._explore(child, (*chosen, symbol), child_path)
            if depth < len(chosen):
                return depth
        return len(chosen)

    def _reach(self, leaf: _Leaf) -> int:
        for known in (self._first, self._best):
            if known is not None and known.path == leaf.path:
                names = {colour: symbol for symbol, colour in leaf.colours.items()}
                self._automorphisms.append({s: names[c] for s, c in known.colours.items()})
                # The automorphism carries the known leaf's branch, which is done, to this one.
                pairs = zip(known.chosen, leaf.chosen, strict=True)
                return next(depth for depth, (a, b) in enumerate(pairs) if a != b)
        if self._first is None:
            self._first = leaf
        if self._best is None or leaf.path < self._best.path:
            self._best = leaf
        return len(leaf.chosen)

    def _is_hopeless(self, path: tuple[tuple[str, ...], ...]) -> bool:
        """Nothing below can be the smallest leaf, nor show an automorphism with the first."""
        if self._first is None or self._best is None:
            return False
        depth = len(path)
        return path != self._first.path[:depth] and path > self._best.path[:depth]

    def _orbit(self, symbol: str, fixed: Sequence[str]) -> set[str]:
        """Where the known automorphisms that leave `fixed` alone can carry a symbol."""
        maps = [m for m in self._automorphisms if all(m.get(s, s) == s for s in fixed)]
        orbit, pending = {symbol}, [symbol]
        while pending:
            current = pending.pop()
            images = {m.get(current, current) for m in maps} - orbit
            orbit |= images
            pending.extend(images)
        return orbit

    def _map_sibling(self, known: _Cells, cells: _Cells) -> bool:
        """Guess an automorphism from one sibling to another without going down to leaves.

        Symbols that are told apart follow their colours; of the others, those that stay in their
        cell stay put and the rest go back along the map. A wrong guess costs one check.
        """
        if known.certificate != cells.certificate:
            return False
        sources, targets = _by_colour(known.colours), _by_colour(cells.colours)
        guess = {
            source[0]: targets[colour][0] for colour, source in sources.items() if len(source) == 1
        }
        back = {target: source for source, target in guess.items()}
        for colour, source in sources.items():
            if len(source) > 1:
                inside = set(targets[colour])
                guess.update({s: s if s in inside else back.get(s, s) for s in source})
        moved = {source: target for source, target in guess.items() if source != target}
        if moved.keys() != set(moved.values()) or not self._is_automorphism(moved):
            return False
        self._automorphisms.append(moved)
        return True


def _rank(symbols: Iterable[str], key: Callable[[str], Any]) -> dict[str, int]:
    """Colours by the order of `key`: the number of symbols with a smaller one."""
    keys = {symbol: key(symbol) for symbol in symbols}
    colours: dict[str, int] = {}
    colour = 0
    previous: object = None
    for number, symbol in enumerate(sorted(keys, key=keys.__getitem__)):
        if number and keys[symbol] != previous:
            colour = number
        previous = keys[symbol]
        colours[symbol] = colour
    return colours


def _individualize(colours: Mapping[str, int], chosen: str) -> dict[str, int]:
    cell = colours[chosen]
    return {s: c + (c == cell and s != chosen) for s, c in colours.items()}


def _by_colour(colours: Mapping[str, int]) -> dict[int, list[str]]:
    cells: dict[int, list[str]] = {}
    for symbol, colour in colours.items():
        cells.setdefault(colour, []).append(symbol)
    return cells


def _open_cells(colours: Mapping[str, int]) -> list[list[str]]:
    """The cells of more than one symbol, in order."""
    return [cell for _, cell in sorted(_by_colour(colours).items()) if len(cell) > 1]
