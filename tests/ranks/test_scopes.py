"""Which ranks decide together."""

from __future__ import annotations

from overlap_core.ranks import connected_scopes, one_sided


def test_ranks_that_share_a_group_form_a_scope() -> None:
    stages = {0: [(0, 1)], 1: [(0, 1)], 2: [(2, 3)], 3: [(2, 3)]}
    assert connected_scopes(stages) == ((0, 1), (2, 3))


def test_ranks_that_share_none_are_connected_through_others() -> None:
    mesh = {0: [(0, 1), (0, 2)], 1: [(0, 1), (1, 3)], 2: [(0, 2), (2, 3)], 3: [(1, 3), (2, 3)]}
    assert connected_scopes(mesh) == ((0, 1, 2, 3),)
    assert connected_scopes({0: [(0, 1)], 1: [(0, 1), (1, 2)], 2: [(1, 2)]}) == ((0, 1, 2),)


def test_a_rank_without_communication_is_alone_unless_others_count_on_it() -> None:
    assert connected_scopes({0: [], 1: []}) == ((0,), (1,))
    assert connected_scopes({0: [(0, 1)], 1: []}) == ((0, 1),)


def test_ranks_whose_graph_nobody_gave_do_not_count() -> None:
    assert connected_scopes({4: [(0, 4, 7)], 7: [(0, 4, 7)]}) == ((4, 7),)


def test_a_rank_that_knows_nothing_of_its_peer_is_found() -> None:
    assert one_sided({0: [(0, 1)], 1: [(0, 1)]}) is None
    assert one_sided({0: [(0, 1)], 1: []}) == (0, 1)
    assert one_sided({0: [(0, 1)]}) is None
