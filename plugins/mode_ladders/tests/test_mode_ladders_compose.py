"""Ladders composed from predicates, and the README's examples."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs
import overlap_mode_ladders
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overlap_mode_ladders import compose

from overlap_core import OverlapConfig
from overlap_core.builtin import ladder as builtin_ladder
from overlap_core.errors import ConfigError, PluginError
from overlap_core.host import PluginHost
from overlap_core.ranks.votes import Mode, ModeDecision, Vote

if TYPE_CHECKING:
    import random

README = Path(__file__).parents[1] / "README.md"
BASE = Vote(rank=0, can=True, fingerprint="f", skeleton="s", entries=3, weight_gathers=2)
IDENTICAL = (BASE, attrs.evolve(BASE, rank=1))
SLOT = (BASE, attrs.evolve(BASE, rank=1, fingerprint="g"))
PINNED = (BASE, attrs.evolve(BASE, rank=1, fingerprint="g", skeleton="t", entries=4))
ABORT = (BASE, attrs.evolve(BASE, rank=1, can=False, why="no luck"))
BALLOTS = (IDENTICAL, SLOT, PINNED, ABORT)


def always(votes: tuple[Vote, ...]) -> bool:
    return True


def never(votes: tuple[Vote, ...]) -> bool:
    return False


def choose(ladder: Any, votes: tuple[Vote, ...]) -> ModeDecision:
    """As the host does it for a stranger's plugin with this one ladder."""
    plugin = ModuleType("stranger")
    plugin.ladder = ladder  # type: ignore[attr-defined]
    config = OverlapConfig(mode_ladder=ladder.__name__)
    return PluginHost.discover(config, plugins=[plugin], environ={}).choose_mode(votes)


def readme_blocks() -> list[str]:
    _, *blocks = README.read_text(encoding="utf-8").split("```python\n")
    return [block.partition("```")[0] for block in blocks]


def test_the_examples_of_the_readme_run() -> None:
    blocks = readme_blocks()
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, str(README), "exec"), {"__name__": "readme"})


def test_the_composed_ladder_of_the_readme() -> None:
    (block,) = [block for block in readme_blocks() if "compose(" in block]
    space: dict[str, Any] = {}
    exec(block, space)
    cautious = space["cautious"]
    assert choose(cautious, IDENTICAL).mode is Mode.IDENTICAL
    assert choose(cautious, SLOT).mode is Mode.SLOT
    shorter = choose(cautious, PINNED)
    assert shorter.mode is Mode.ABORT
    assert shorter.why.startswith("cautious: skeletons differ in length (the votes allow pinned")
    many = tuple(attrs.evolve(BASE, rank=rank) for rank in range(513))
    assert choose(cautious, many).mode is Mode.PINNED


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("votes", BALLOTS)
def test_a_rule_holds_back_and_never_frees(votes: tuple[Vote, ...], mode: Mode) -> None:
    default = builtin_ladder.default(votes)
    decision = choose(compose("probe", [(always, mode, "it is Monday")]), votes)
    modes = tuple(Mode)
    assert modes.index(decision.mode) == max(modes.index(mode), modes.index(default.mode))
    assert default.why in decision.why
    assert ("probe: it is Monday" in decision.why) == (decision.mode is not default.mode)


@pytest.mark.parametrize("votes", BALLOTS)
@pytest.mark.parametrize("rules", [[], [(never, Mode.ABORT, "never")]])
def test_without_a_rule_that_applies_default_decides(rules: Any, votes: tuple[Vote, ...]) -> None:
    assert choose(compose("probe", rules), votes) == builtin_ladder.default(votes)


def test_the_first_rule_that_applies_counts() -> None:
    rules = [
        (never, "abort", "never"),
        (lambda votes: len(votes) == 2, "identical", "two ranks may do as they like"),
        (always, "pinned", "otherwise pinned"),
    ]
    ladder = compose("probe", rules)
    assert choose(ladder, SLOT).mode is Mode.SLOT
    assert choose(ladder, (BASE,)).mode is Mode.PINNED
    assert ladder.__doc__
    assert "- pinned if otherwise pinned" in ladder.__doc__


def test_several_composed_ladders_live_in_one_plugin() -> None:
    plugin = ModuleType("stranger")
    for mode in ("pinned", "abort"):
        setattr(plugin, mode, compose(f"always_{mode}", [(always, mode, "always")]))
    for mode in ("pinned", "abort"):
        config = OverlapConfig(mode_ladder=f"always_{mode}")
        host = PluginHost.discover(config, plugins=[plugin, overlap_mode_ladders], environ={})
        assert host.choose_mode(IDENTICAL).mode == mode


rules = st.lists(
    st.tuples(
        st.sampled_from(
            [
                always,
                never,
                lambda votes: len(votes) > 2,
                lambda votes: len({vote.fingerprint for vote in votes}) > 1,
                lambda votes: votes[0].entries > 3,
            ]
        ),
        st.sampled_from(list(Mode)),
        st.sampled_from(["one reason", "another"]),
    ),
    max_size=4,
)
ballots = st.lists(
    st.builds(
        Vote,
        rank=st.integers(0, 30),
        can=st.sampled_from([True, True, True, False]),
        fingerprint=st.sampled_from("fg"),
        skeleton=st.sampled_from("st"),
        entries=st.integers(3, 4),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda vote: vote.rank,
)


@given(rules, ballots, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_composed_ladders_are_pure_and_never_freer(
    rules: Any, votes: list[Vote], rng: random.Random
) -> None:
    first = compose("probe", rules)(tuple(votes))
    rng.shuffle(votes)
    assert compose("probe", iter(rules))(tuple(votes)) == first
    modes = tuple(Mode)
    default = builtin_ladder.default(tuple(votes))
    assert modes.index(first.mode) >= modes.index(default.mode)


@pytest.mark.parametrize("answer", [None, 1, "yes"])
def test_a_predicate_that_says_neither_true_nor_false_is_named(answer: Any) -> None:
    ladder = compose("probe", [(never, "abort", "never"), (lambda votes: answer, "abort", "?")])
    with pytest.raises(PluginError, match=r"(?s)'stranger'.*ladder 'probe', rule 2: .*True or"):
        choose(ladder, IDENTICAL)


@pytest.mark.parametrize("name", ["default", "overlap_choose_mode", "no identifier", "", 3])
def test_names_that_cannot_be_used(name: Any) -> None:
    with pytest.raises(ConfigError, match="expected an identifier other than default"):
        compose(name, [])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ((always, "pinned"), r"rule 1 is .*: expected \(predicate, mode, why\)"),
        (always, r"rule 1 is .*: expected \(predicate, mode, why\)"),
        ((True, "pinned", "why"), "rule 1: True is no predicate"),
        ((always, "free", "why"), "rule 1: 'free' is no mode; expected one of identical, slot,"),
        ((always, "pinned", " "), "rule 1: ' ' is no reason"),
        ((always, "pinned", None), "rule 1: None is no reason"),
    ],
)
def test_rules_that_cannot_be_used(rule: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose("probe", [rule])
