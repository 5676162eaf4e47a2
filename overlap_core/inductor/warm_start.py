"""The plan file of this rank, and what Inductor's caches are told of it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import uuid
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo.config as dynamo_config
from torch._inductor.codecache import BypassFxGraphCache
from torch._inductor.runtime.runtime_utils import cache_dir

from overlap_core.costs import IDEAL
from overlap_core.ranks import AgreementBook
from overlap_core.ranks.plan_file import (
    PlanFile,
    agree_on_start,
    load_plan_file,
    new_name,
    save_plan_file,
    with_agreement,
)
from overlap_core.registry import registry_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from overlap_core.config import OverlapConfig
    from overlap_core.costs import Cost, CostRequest
    from overlap_core.host import PluginHost
    from overlap_core.ranks import Agreement, GraphKey
    from overlap_core.ranks.store import KeyValueStore

__all__ = ["Agreements", "find_plan_folder", "setting_of"]

logger = logging.getLogger(__name__)

_LONGEST_PATIENCE_S = 60.0


def setting_of(config: OverlapConfig, host: PluginHost) -> str:
    """Digest of all that ranks must share before they can agree on anything."""
    words = [config.digest(), host.digest(), registry_digest()]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def find_plan_folder(config: OverlapConfig) -> Path:
    """Where plan files lie under a configuration, whether the folder exists or not."""
    given = config.plan_dir or os.environ.get("OVERLAP_CORE_PLAN_DIR")
    return Path(given) if given else Path(cache_dir()) / "overlap_core"


class Agreements:
    """What the ranks agreed on under one configuration, in memory and in the plan file.

    Args:
        store: shared by all ranks of the job; None: there is nobody to ask.
        rank, world_size: of this process.
        setting: from `setting_of`.
        config: where files are, and whether there are any.
        number: of the job on this store.
        plugin_files: code of the plugins; a plugin that was edited makes a start cold.
        place: how many configurations of the job came before this one.
        in_vain: whether a rank is known not to take part.
    """

    def __init__(
        self,
        store: KeyValueStore | None,
        rank: int,
        world_size: int,
        setting: str,
        config: OverlapConfig,
        number: int = 1,
        plugin_files: Iterable[str] = (),
        *,
        place: int = 0,
        in_vain: Callable[[], bool] = lambda: False,
    ) -> None:
        self.book = AgreementBook()
        self.costs: dict[CostRequest, Cost] = {}
        """What was measured so far, by key; of what communicates, by all ranks together."""
        self.machine = IDEAL
        """As it was probed by all ranks together."""
        self.plan = ""
        """The name under which all ranks keep their plan files, or did until one was dropped."""
        self._rank = rank
        self._path: Path | None = None
        self._file: PlanFile | None = None
        if config.warm_start:
            header = _header(world_size, setting, plugin_files)
            name = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()[:16]
            self._path = find_plan_folder(config) / name / f"rank{rank}.json"
            found = load_plan_file(self._path, header)
            if store is None:
                self._start(found or PlanFile(name=new_name(), header=header), found is not None)
            else:
                file, warm = agree_on_start(
                    store,
                    f"overlap_core/start/{number}/{setting[:16]}",
                    world_size,
                    found,
                    header,
                    min(config.deadline_s, _LONGEST_PATIENCE_S),
                    asked=f"overlap_core/start/{number}/asked/{place}",
                    in_vain=in_vain,
                )
                self._start(file, warm)

    def _start(self, file: PlanFile | None, warm: bool) -> None:
        self._file = file
        if self._file is None:
            return
        self.plan = self._file.name
        for key, agreement in self._file.agreements:
            self.book.add(key, agreement)
        if not warm:
            self._save()

    def add(self, key: GraphKey, agreement: Agreement) -> None:
        """Remember an agreement, here and for the next start.

        Written before anything that was compiled under it can reach a cache.
        """
        self.book.add(key, agreement)
        if self._file is None:
            return
        if not agreement.lasting:
            self.drop()
            return
        self._file = with_agreement(self._file, key, agreement)
        self._save()

    def drop(self) -> None:
        """Make the next start a cold one on all ranks, since this rank has no file to show."""
        self._file = None
        if self._path is not None:
            try:
                self._path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("plan file %s cannot be removed: %s", self._path, error)

    def token(self, code: str) -> str:
        """What the cache keys of this rank's compiled code must contain.

        Args:
            code: the function that is compiled. Another one of equal code has agreements of its
                own.

        Raises:
            BypassFxGraphCache: this rank must keep away from caches.
        """
        if self._file is None:
            raise BypassFxGraphCache("overlap_core has no plan that all ranks hold")
        if getattr(dynamo_config, "caching_precompile", False):
            raise BypassFxGraphCache("Dynamo would load what it keeps under any plan")
        return f"overlap_core {self.plan} rank {self._rank} {code}"

    def mark_code(self, wrapper_code: Any) -> str:
        """Let the code that is being generated say when it is loaded, and under which plan it was
        made, see `report.cached`.

        Returns:
            The name of the graph's report; empty if there is none to come back to.
        """
        header = getattr(wrapper_code, "header", None)
        if self._file is None or self._path is None or header is None:
            return ""
        name = uuid.uuid4().hex
        folder = self._path.with_suffix("") / self._file.name
        header.writeline("from overlap_core.report.cached import note_loaded as _note_loaded")
        header.writeline(f"_note_loaded({str(folder)!r}, {name!r}, {self.plan!r})")
        return name

    def _save(self) -> None:
        assert self._path is not None
        assert self._file is not None
        try:
            save_plan_file(self._path, self._file)
        except OSError as error:
            logger.warning(
                "plan file %s cannot be written (%s); the next start will negotiate again",
                self._path,
                error,
            )
            self.drop()


def _header(world_size: int, setting: str, plugin_files: Iterable[str]) -> dict[str, str]:
    """What must not change between two starts of a job."""
    return {
        "overlap_core": version("overlap-core"),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "world_size": str(world_size),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "program": f"{Path(sys.argv[0]).name} {_content_digest([sys.argv[0]])}",
        "plugins": _content_digest(plugin_files),
        "setting": setting,
    }


def _content_digest(files: Iterable[str]) -> str:
    """Hex digest of what files hold; a file that isn't there counts as empty."""
    digest = hashlib.sha256()
    for file in files:
        try:
            digest.update(Path(file).read_bytes())
        except OSError:
            digest.update(b"")
        digest.update(b"\0")
    return digest.hexdigest()[:16]
