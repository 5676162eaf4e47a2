"""Which two operations meet in the wrong order, and between whom."""

from __future__ import annotations

from overlap_core.ranks.crossings import Issued, decode_issued, encode_issued, find_crossing


def issued(*texts: str, captured: tuple[int, ...] = ()) -> list[Issued]:
    """`op/0,1` is an op on the group of ranks 0 and 1; `op` one on a group that nobody knows."""
    found = []
    for number, text in enumerate(texts):
        op, _, ranks = text.partition("/")
        found.append(
            Issued(
                node=f"{op}{number}",
                text=op,
                ranks=tuple(int(rank) for rank in ranks.split(",")) if ranks else (),
                captured=captured[number] if captured else None,
            )
        )
    return found


def test_one_order_crosses_nothing() -> None:
    assert find_crossing({}) is None
    assert find_crossing({r: issued("a/0,1", "b/0,1", "a/0,1") for r in (0, 1)}) is None


def test_operations_that_do_not_meet_may_come_in_any_order() -> None:
    ranks = {
        0: issued("a/0,1", "own/0", "b/0,2", "unknown"),
        1: issued("own/1", "c/1,3", "a/0,1"),
        2: issued("b/0,2", "d/2,3"),
        3: issued("d/2,3", "unknown", "c/1,3"),
    }
    assert find_crossing(ranks) is None


def test_the_pair_is_named_on_both_ranks() -> None:
    ranks = {
        0: issued("a/0,1", "x/0,2"),
        1: issued("a/0,1"),
        2: issued("x/0,2", "a/2,3", "b/2,3", "more/2,3"),
        3: issued("b/2,3", "a/2,3"),
    }
    crossing = find_crossing(ranks)
    assert crossing is not None
    assert (crossing.low, crossing.high) == (2, 3)
    assert [one.node for one in (*crossing.on_low, *crossing.on_high)] == ["a1", "b2", "a1", "b0"]
    assert str(crossing) == (
        "two operations will meet in the wrong order: a on the group of ranks 2, 3 (node 'a1' on "
        "rank 2, 'a1' on rank 3) comes before b on the group of ranks 2, 3 (node 'b2' on rank 2, "
        "'b0' on rank 3) on rank 2, and behind it on rank 3"
    )


def test_two_groups_that_share_two_ranks_can_cross() -> None:
    ranks = {
        0: issued("a/0,1,2", "b/0,1"),
        1: issued("b/0,1", "a/0,1,2"),
        2: issued("a/0,1,2"),
    }
    crossing = find_crossing(ranks)
    assert crossing is not None
    assert (crossing.low, crossing.high) == (0, 1)


def test_the_captured_order_tells_equal_operations_apart() -> None:
    ranks = {
        0: issued("a/0,1", "a/0,1", captured=(0, 1)),
        1: issued("a/0,1", "a/0,1", captured=(1, 0)),
    }
    crossing = find_crossing(ranks)
    assert crossing is not None
    assert [one.node for one in crossing.on_high] == ["a1", "a0"]


def test_messages_are_read_back() -> None:
    sent = issued("a/0,1", "unknown", captured=(1, 0))
    assert decode_issued(encode_issued(sent)) == tuple(sent)
