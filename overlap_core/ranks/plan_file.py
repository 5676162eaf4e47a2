"""Agreements that outlive the job, so that its next start neither negotiates nor compiles.

One file a rank. A start is *warm* if all ranks hold files of one name and the ranks of each scope
hold the same agreements, which they find out once, by counters in the job's store, before
anything is taken from a cache. Then agreements are followed
as they are in the file, and compiled code may be loaded that was made under them. Otherwise the
start is *cold*: all ranks begin a new file under a new name, and whatever was compiled under
another name is not found.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Mapping  # noqa: TC003  cattrs reads the annotations
from pathlib import Path
from typing import TYPE_CHECKING

import cattrs
from attrs import evolve, frozen

from overlap_core._clock import REAL_CLOCK, Clock
from overlap_core._files import write_in_one_step

from .agreements import Agreement, GraphKey  # noqa: TC001  cattrs reads the annotations

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from .store import KeyValueStore

__all__ = [
    "VERSION",
    "PlanFile",
    "agree_on_start",
    "load_plan_file",
    "new_name",
    "save_plan_file",
    "with_agreement",
]

logger = logging.getLogger(__name__)

VERSION = 3
_PAUSE_S = 0.01
_LOOK_S = 1.0
"""How often a rank that waits asks whether it waits in vain."""


@frozen(kw_only=True)
class PlanFile:
    """What one rank keeps for the next start."""

    name: str
    """Given by the cold start that began it, equal on all ranks."""
    header: Mapping[str, str]
    """Versions, plugins, configuration, world size: what must not change between starts."""
    agreements: tuple[tuple[GraphKey, Agreement], ...] = ()

    def shared(self) -> dict[tuple[int, ...], str]:
        """For each scope a digest of what all of its ranks must hold."""
        found: dict[tuple[int, ...], list[list[object]]] = {}
        for key, agreed in self.agreements:
            row: list[object] = [
                *(key.code, key.structure),
                *(agreed.mode, agreed.sequence, agreed.calls),
            ]
            found.setdefault(agreed.scope, []).append(row)
        return {scope: _digest(sorted(rows)) for scope, rows in sorted(found.items())}


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def new_name() -> str:
    """A name that no other file has."""
    return uuid.uuid4().hex


def load_plan_file(path: str | os.PathLike[str], header: Mapping[str, str]) -> PlanFile | None:
    """The file, if it was made under this header; None if there is none that can be used."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if data["version"] != VERSION or data["header"] != dict(header):
            return None
        return _converter.structure(data["file"], PlanFile)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, cattrs.BaseValidationError) as error:
        logger.warning("plan file %s is not used (%s: %s)", path, type(error).__name__, error)
        return None


def save_plan_file(path: str | os.PathLike[str], file: PlanFile) -> None:
    """Write the file in one step.

    Raises:
        OSError: it cannot be written; the old one is still there.
    """
    data = {
        "version": VERSION,
        "header": dict(file.header),
        "file": _converter.unstructure(file),
    }
    write_in_one_step(path, json.dumps(data))


def agree_on_start(
    store: KeyValueStore,
    prefix: str,
    world_size: int,
    file: PlanFile | None,
    header: Mapping[str, str],
    patience_s: float,
    clock: Clock = REAL_CLOCK,
    asked: str = "",
    in_vain: Callable[[], bool] = lambda: False,
) -> tuple[PlanFile | None, bool]:
    """Find out together whether this start is warm. A rank without a file waits for nobody.

    Whoever knows first decides for all: that all ranks hold what they should, or that one does not.

    Args:
        store: shared by all ranks of the job.
        prefix: of the keys; another one for each question.
        world_size: how many ranks there are.
        file: what this rank holds; None: nothing.
        header: for the new file of a cold start.
        patience_s: how long to wait for ranks that have not come.
        clock: tells the time and waits.
        asked: key that counts ranks that ask under whatever prefix. Empty: this one's.
        in_vain: whether a rank is known not to come; asked now and then.

    Returns:
        The file to go on with and whether the start is warm. No file: the ranks decided on one
        that this rank does not hold, so it must keep away from caches.
    """
    started = looked = clock.now()
    decided = f"{prefix}/decision"
    asked = asked or f"{prefix}/asked"
    if file is None:
        decision = store.compare_set(decided, "", f"cold {new_name()}")
        store.add(asked, 1)
        return _read(decision, file, header)
    scopes = {
        f"{prefix}/{_digest([scope, digest])}": len(scope)
        for scope, digest in file.shared().items()
    }
    same, arrived = f"{prefix}/{file.name}", f"{prefix}/arrived"
    for count in (*scopes, same, arrived, asked):
        store.add(count, 1)
    agreeing = alone = False
    while not store.check([decided]):
        # Each rank counts under its file's name before it counts as arrived.
        others = store.add(arrived, 0)
        alike = store.add(same, 0) >= others
        if alike and others == world_size and not agreeing:
            # Everybody has counted: what is missing in a scope now stays missing.
            alike = agreeing = all(store.add(key, 0) == size for key, size in scopes.items())
            store.add(f"{prefix}/agreeing", int(agreeing))
        if agreeing and store.add(f"{prefix}/agreeing", 0) == world_size:
            store.compare_set(decided, "", f"warm {file.name}")
        elif not alike or alone or clock.now() - started > patience_s:
            store.compare_set(decided, "", f"cold {new_name()}")
        elif clock.now() - looked > _LOOK_S:
            # Each rank counts as arrived before it counts as one that asked.
            elsewhere = store.add(asked, 0) == world_size > store.add(arrived, 0)
            looked, alone = clock.now(), elsewhere or in_vain()
        else:
            clock.sleep(_PAUSE_S)
    return _read(store.get(decided), file, header)


def _read(
    decision: bytes, file: PlanFile | None, header: Mapping[str, str]
) -> tuple[PlanFile | None, bool]:
    kind, _, name = bytes(decision).decode().partition(" ")
    if kind == "cold":
        return PlanFile(name=name, header=header), False
    return (file, True) if file is not None and file.name == name else (None, False)


def with_agreement(file: PlanFile, key: GraphKey, agreement: Agreement) -> PlanFile:
    """The file with one more agreement."""
    found = {**dict(file.agreements), key: agreement}
    return evolve(file, agreements=tuple(sorted(found.items())))  # keys differ, so they decide


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=False)
    converter.register_unstructure_hook(tuple, list)
    return converter


_converter = _make_converter()
