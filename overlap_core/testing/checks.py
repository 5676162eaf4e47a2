"""Assertions on what the pass decided, independent of the pass's own analysis of a graph."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from overlap_core.skeleton import arrange, comparable_size, find_reordered, may_differ, merge
from overlap_core.testing._values import maker, run_symbolically

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from overlap_core.graph import Node, OverlapGraph
    from overlap_core.outcome import RankOutcome
    from overlap_core.skeleton import SkeletonEntry

__all__ = ["assert_legal", "assert_same_collective_sequence"]

_AROUND = 3
"""Entries that a failure shows on each side of the first difference."""


def assert_legal(graph: OverlapGraph, order: Sequence[str]) -> None:
    """Every node runs once, sees what it saw in program order, and follows its `after` nodes.

    The values are followed symbolically, without the dependencies that the pass derives.

    Args:
        graph: one rank's graph.
        order: its nodes' names, such as `RankOutcome.order`.

    Raises:
        AssertionError: names the first node that is missing, is there twice, or sees another
            value, or the buffer that is left with another one.
    """
    by_name = {node.name: node for node in graph.nodes}
    place = {name: spot for spot, name in enumerate(order)}
    for what, names in (
        ("unknown", set(place) - set(by_name)),
        ("missing", set(by_name) - set(place)),
    ):
        if names:
            raise AssertionError(f"the order is not one of this graph: {what} {sorted(names)}")
    if len(place) != len(order):
        twice = sorted({name for name in order if list(order).count(name) > 1})
        raise AssertionError(f"the order has nodes more than once: {twice}")
    final, program = run_symbolically(graph), run_symbolically(graph, graph.nodes)
    for name in order:
        node = by_name[name]
        for earlier in node.after:
            if place[earlier] > place[name]:
                raise AssertionError(f"node {name!r} must come after {earlier!r}")
        try:
            final.step(node)
        except KeyError as error:
            raise AssertionError(
                f"node {name!r} reads buffer {error.args[0]!r} before anything has written it"
            ) from None
        for (buffer, got), (_, wanted) in zip(final.seen[name], program.seen[name], strict=True):
            if got != wanted:
                raise AssertionError(
                    f"node {name!r} sees in buffer {buffer!r} what {got!r} made; in program order "
                    f"it is what {wanted!r} made"
                )
    for buffer, value in program.buffers.items():
        if maker(final.buffers[buffer]) != maker(value):
            raise AssertionError(
                f"buffer {buffer!r} is left with what {maker(final.buffers[buffer])!r} made; in "
                f"program order it is what {maker(value)!r} made"
            )


def assert_same_collective_sequence(
    outcomes: Iterable[RankOutcome], *, tolerate_program_differences: bool = False
) -> None:
    """Any two ranks issue the same collectives, in the same order, on the groups that they share.

    This is what must never break: ranks that enter different collectives hang. Collectives are
    compared by what means the same on every rank (op, static sizes, dtypes, size of the group and
    the group by first appearance) and by their place in the captured graph, or in program order
    where that isn't known, so that two gathers of equal shape that swapped on one rank are found.
    The place doesn't count where no two launches look alike: ranks may have come with them in
    different orders, of which one was restored. Communication on a group that nobody named counts
    as shared with every rank. Rows of all-to-alls and custom ops may be each rank's own share, but
    not where sizes show that two launches have swapped.

    Args:
        outcomes: of all ranks, such as from `FakeRanks` or `overlap_core.simulate`.
        tolerate_program_differences: accept ranks that issue different collectives in program
            order already, as long as nothing was moved on them.

    Raises:
        AssertionError: shows both sequences around the first difference.
        ValueError: an outcome has no graph, as when the pass was switched off.
    """
    issued = [_Issued.of(outcome) for outcome in outcomes]
    for one, other in combinations(issued, 2):
        _compare(one, other, tolerate_program_differences)


@frozen(kw_only=True)
class _Issued:
    """The communicating nodes of one rank, in program order and in the final one."""

    rank: int
    program: tuple[Node, ...]
    final: tuple[Node, ...]
    entries: Mapping[str, SkeletonEntry]
    """By node."""

    @classmethod
    def of(cls, outcome: RankOutcome) -> _Issued:
        if outcome.graph is None:
            raise ValueError(f"the outcome of rank {outcome.rank} has no graph: {outcome.why}")
        issuing = set(outcome.collectives)
        by_name = {node.name: node for node in outcome.graph.nodes}
        program = tuple(node for node in outcome.graph.nodes if node.name in issuing)
        final = tuple(by_name[name] for name in outcome.order if name in issuing)
        entries = {entry.node: entry for entry in outcome.skeleton}
        return cls(rank=outcome.rank, program=program, final=final, entries=entries)

    def shared_with(self, rank: int) -> _Issued:
        def reaches(node: Node) -> bool:
            return node.group_ranks is None or rank in node.group_ranks

        program, final = (tuple(filter(reaches, nodes)) for nodes in (self.program, self.final))
        return evolve(self, program=program, final=final)

    @property
    def captured(self) -> tuple[Node, ...]:
        """In the order of the captured graph; empty if that is not known of every node."""
        places = {node.captured for node in self.program}
        if None in places or len(places) < len(self.program):
            return ()
        return tuple(sorted(self.program, key=lambda node: node.captured or 0))

    def rows(self, nodes: Sequence[Node], numbered: Sequence[Node]) -> list[_Row]:
        """Each node in words that mean the same on every rank, with its number among `numbered`."""
        groups: dict[str | None, int] = {}
        for node in numbered:
            groups.setdefault(node.group, len(groups))
        number = {node.name: spot for spot, node in enumerate(numbered)}
        rows = []
        for node in nodes:
            size = "?" if node.group_ranks is None else len(node.group_ranks)
            where = f"group {groups[node.group]} of {size}"
            words = f"#{number[node.name]} {node.op} {','.join(node.dtypes)} on {where}"
            rows.append(_Row(words, node))
        return rows


@frozen
class _Row:
    """One launch; `#n` in its words is its number in the captured graph, or in program order."""

    words: str
    node: Node

    def fits(self, other: _Row) -> bool:
        return self.words == other.words and _same_sizes(self.node, other.node)

    @property
    def alone(self) -> tuple[object, ...]:
        """All that tells it apart from others without its number, symbolic sizes aside."""
        node = self.node
        return node.op, node.dtypes, tuple(tuple(map(comparable_size, s)) for s in node.sizes)


def _compare(one: _Issued, other: _Issued, tolerate: bool) -> None:
    one, other = one.shared_with(other.rank), other.shared_with(one.rank)
    pair = f"ranks {one.rank} and {other.rank} issue different collectives"
    captured = all(side.captured for side in (one, other))
    programs, finals = (
        [side.rows(nodes, side.captured if captured else side.program) for side, nodes in sides]
        for sides in (
            ((one, one.program), (other, other.program)),
            ((one, one.final), (other, other.final)),
        )
    )
    differ = _first_difference(*finals)
    parted = _first_difference(*programs)
    if not captured:
        differ = _first_swapped(one, other, *finals) if differ is None else differ
        parted = _first_swapped(one, other, *programs) if parted is None else parted
    if differ is None or _is_one_without_numbers(one, other):
        return
    if tolerate and parted is not None:
        for side, program, final in zip((one, other), programs, finals, strict=True):
            moved = _first_difference(program, final)
            if moved is not None:
                raise AssertionError(
                    f"{pair} in program order, so nothing may move, but on rank {side.rank} "
                    "something did\n"
                    f"{_show('program order', program, moved)}{_show('final order', final, moved)}"
                )
        return
    shown = [
        _show(f"rank {side.rank}", final, differ)
        for side, final in zip((one, other), finals, strict=True)
    ]
    raise AssertionError(f"{pair}, first at {differ}\n{''.join(shown)}")


def _is_one_without_numbers(one: _Issued, other: _Issued) -> bool:
    """Whether two ranks issue one sequence in which no two launches look alike."""
    ours, theirs = (side.rows(side.final, side.final) for side in (one, other))
    looks = [row.alone for row in ours]
    return (
        looks == [row.alone for row in theirs]
        and len(set(looks)) == len(looks)
        and _first_difference(ours, theirs) is None
    )


def _first_difference(rows: list[_Row], others: list[_Row]) -> int | None:
    for spot, (row, other) in enumerate(zip(rows, others, strict=False)):
        if not row.fits(other):
            return spot
    return None if len(rows) == len(others) else min(len(rows), len(others))


def _same_sizes(one: Node, other: Node) -> bool:
    """Equal wherever both are static, but for a rank's own share of the rows.

    Ranks may differ in which dimensions are symbolic.
    """
    if [len(sizes) for sizes in one.sizes] != [len(sizes) for sizes in other.sizes]:
        return False
    outputs = []
    for pair in zip(one.sizes, other.sizes, strict=True):
        ours, theirs = (map(comparable_size, sizes) for sizes in pair)
        outputs.append(list(zip(ours, theirs, strict=True)))
    return may_differ(one.op, outputs)


def _first_swapped(
    one: _Issued, other: _Issued, ours: list[_Row], theirs: list[_Row]
) -> int | None:
    """The first place with rows of each rank's own, if they show that two launches have swapped."""
    skeletons = [
        arrange([side.entries[row.node.name] for row in rows], range(len(rows)))
        for side, rows in ((one, ours), (other, theirs))
    ]
    merged = merge(skeletons)
    # Whoever made the graphs says what all-to-alls exchange.
    rows = zip(ours, theirs, strict=True)
    matched = [place for place, pair in enumerate(rows) if all(row.node.sent for row in pair)]
    if find_reordered(skeletons, merged.uneven, matched=matched):
        return merged.uneven[0]
    return None


def _show(title: str, rows: list[_Row], place: int) -> str:
    """The rows around a place, the one there marked."""
    lines = [f"{title}:"]
    for spot in range(max(0, place - _AROUND), min(len(rows), place + _AROUND + 1)):
        row, mark = rows[spot], ">" if spot == place else " "
        sizes = " ".join(str(list(size)) for size in row.node.sizes)
        lines.append(f"  {mark} {spot}: {row.words} {sizes} ({row.node.name})")
    if place >= len(rows):
        lines.append(f"  > {place}: (nothing more)")
    return "\n".join(lines) + "\n"
