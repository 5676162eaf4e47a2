"""What the facts of all ranks mean together. Pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_core.report import ranks_in_words

from .findings import Finding, merge_ranks
from .machine import check_rank, check_world_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .facts import RankFacts

__all__ = ["check_ranks", "compare_ranks", "compare_versions"]

_SHOWN = 12
"""Digits of a digest."""
_MOST_GROUPS = 8


def check_ranks(facts: Sequence[RankFacts], world_size: int) -> tuple[Finding, ...]:
    """Findings about each rank, equal ones said once, and about all of them together.

    Args:
        facts: of the ranks that answered and run one version, by rank.
        world_size: of the job.
    """
    alone = merge_ranks({one.rank: check_rank(one) for one in facts})
    together = compare_ranks(facts, world_size) if len(facts) > 1 else ()
    return (*alone, *check_world_size(world_size), *together)


def compare_versions(versions: Mapping[int, str]) -> tuple[Finding, ...]:
    """Findings about the versions of overlap_core, by rank."""
    groups = _group(versions)
    if len(groups) == 1:
        return ()
    return (
        Finding(
            kind="overlap-core-differs",
            what=f"different versions of overlap-core: {_say(groups)}",
            do="install one version on all ranks; what else differs is looked at after that",
        ),
    )


def compare_ranks(facts: Sequence[RankFacts], world_size: int) -> tuple[Finding, ...]:
    """Findings about what differs between ranks of one version, or that nothing does."""
    checks = (_switch, _plugins, _ops, _settings, _switches)
    found = [finding for check in checks for finding in check(facts)]
    if not found:
        words = (
            f"{len(facts)} ranks answered, with the same versions, plugins, registered ops, "
            "configuration and compiler settings"
        )
        found.append(Finding(kind="ranks-agree", what=words))
    return (*found, *_plans(facts, world_size))


def _switch(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    groups = _group({one.rank: _switch_of(one) for one in facts})
    if len(groups) > 1:
        yield Finding(
            kind="switch-differs",
            what=f"OVERLAP_CORE=0 is set on some ranks only: {_say(groups)}; those that are on "
            "would be left in program order",
            do="set it alike on all ranks",
        )


def _plugins(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    loaded = [one for one in facts if not one.plugin_faults]
    if len({one.plugins for one in loaded}) < 2:
        return
    everywhere = set.intersection(*(set(one.plugins) for one in loaded))

    def special(one: RankFacts) -> str:
        extra = [name for name in one.plugins if name not in everywhere]
        shown = ", ".join(extra) or "nothing that others lack"
        variable = "OVERLAP_CORE_DISABLE_PLUGINS"
        left_out = one.environment.get(variable)
        return f"{shown} ({variable}={left_out})" if left_out else shown

    groups = _group({one.rank: special(one) for one in loaded})
    yield Finding(
        kind="plugins-differ",
        what=f"different plugins, so that every graph would be left in program order: "
        f"{_say(groups)}",
        do="install the same plugins and versions on all ranks, or leave out the same ones",
    )


def _ops(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    # Other plugins register other ops: then those are to be mended first.
    if len({one.plugins for one in facts}) > 1 or len({one.ops_digest for one in facts}) < 2:
        return
    everywhere = set.intersection(*(set(one.ops) for one in facts))
    groups = _group(
        {
            one.rank: ", ".join(op for op in one.ops if op not in everywhere) or "no further ones"
            for one in facts
        }
    )
    yield Finding(
        kind="ops-differ",
        what=f"different registered ops, so that every graph would be left in program order: "
        f"{_say(groups)}",
        do="use the same version of the libraries that register them on all ranks",
    )


def _settings(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """What is one word on each rank, and should be the same."""
    rows = (
        (
            "config-differs",
            {one.rank: one.config[:_SHOWN] for one in facts},
            "different configuration, so that every graph would be left in program order",
            "give every rank the same OverlapConfig",
        ),
        (
            "torch-differs",
            {one.rank: one.torch or "none" for one in facts},
            "different versions of torch, which may compile different graphs",
            "install one version on all ranks",
        ),
        (
            "python-differs",
            {one.rank: one.python for one in facts},
            "different versions of Python, which may capture different graphs",
            "use one version on all ranks",
        ),
    )
    for kind, words, what, do in rows:
        groups = _group(words)
        if len(groups) > 1:
            yield Finding(kind=kind, what=f"{what}: {_say(groups)}", do=do)


def _switches(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    facts = [one for one in facts if not one.torch_fault]
    known = sorted({key for one in facts for key in one.switches})
    apart = [key for key in known if len({one.switches.get(key) for one in facts}) > 1]

    def say(one: RankFacts) -> str:
        words = [f"{key}={one.switches[key]}" for key in apart if key in one.switches]
        if passes_differ:
            words.append(f"reorder passes {', '.join(one.reorder_passes) or 'none'}")
        return ", ".join(words) or "unknown"

    passes_differ = len({one.reorder_passes for one in facts}) > 1
    if apart or passes_differ:
        yield Finding(
            kind="settings-differ",
            what=f"different settings of torch's compiler, which may make different graphs: "
            f"{_say(_group({one.rank: say(one) for one in facts}))}",
            do="set them alike on all ranks",
        )


def _plans(facts: Sequence[RankFacts], world_size: int) -> Iterator[Finding]:
    """Plan files of a job of this size that one rank holds and another one does not."""
    held: dict[str, dict[int, str]] = {}
    for one in facts:
        for plan in one.plans:
            if plan.world_size == str(world_size):
                held.setdefault(plan.setting, {})[one.rank] = plan.name
    for setting, names in sorted(held.items()):
        by_rank = {one.rank: names.get(one.rank, "no file")[:_SHOWN] for one in facts}
        groups = _group(by_rank)
        if len(groups) > 1:
            yield Finding(
                kind="plans-differ",
                what=f"plan files {setting} do not belong together: {_say(groups)}; that job would "
                "start cold",
                do="nothing: the next start writes new ones; or keep the folder of every rank",
            )


def _switch_of(facts: RankFacts) -> str:
    return "off" if facts.environment.get("OVERLAP_CORE", "").strip() == "0" else "on"


def _group(said: Mapping[int, str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, words in sorted(said.items()):
        groups.setdefault(words, []).append(rank)
    return groups


def _say(groups: Mapping[str, Sequence[int]]) -> str:
    parts = [f"{ranks_in_words(ranks)}: {words}" for words, ranks in groups.items()]
    left_out = len(parts) - _MOST_GROUPS
    more = [f"and {left_out} more groups of ranks"] if left_out > 0 else []
    return "; ".join([*parts[:_MOST_GROUPS], *more])
