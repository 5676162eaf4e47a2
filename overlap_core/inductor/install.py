"""Installation: per call of `torch.compile`, for a block of code, or for the whole process.

`options=` reaches every thread and a backward graph that is compiled later, but Inductor's
configuration does not: since torch 2.13 it belongs to one thread. The process-wide installation
therefore hands its options to `compile_fx`, through which each compile goes in its own thread.
"""

from __future__ import annotations

import functools
import logging
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch._inductor.compile_fx as compile_fx_module
import torch._inductor.config as inductor_config

from overlap_core.config import OverlapConfig, disabled_by_environment
from overlap_core.host import PluginHost
from overlap_core.outcome import RankOutcome
from overlap_core.ranks import Mode
from overlap_core.session import session

from .groups import rank_and_world_size
from .input_kinds import capturing
from .job import forget_other_job
from .numbering import with_numbering
from .off import failure_in_words, go_without, overlap_again, tell_peers
from .overlap_pass import OverlapPass
from .records import add_record
from .versions import SIMPLE_OVERLAP_KEY, check_torch, has_config_key
from .warm_start import setting_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["disable", "enable", "enabled", "inductor_options"]

logger = logging.getLogger(__name__)

_GATE = "reorder_for_compute_comm_overlap"
_PASSES = "reorder_for_compute_comm_overlap_passes"


def inductor_options(config: OverlapConfig | None = None) -> dict[str, Any]:
    """Options for `torch.compile(model, options=...)` that install the pass for that model.

    Reorder passes that are configured in Inductor now stay and run before ours. With
    `OVERLAP_CORE=0` the result is empty. Peers hear of that, and of errors, and don't wait.

    Args:
        config: None: the defaults. Must be equal on all ranks.

    Raises:
        UnsupportedTorchError: this torch is outside the supported range, or lacks a name.
        PluginError, ConfigError: a plugin or the configuration is unusable.
    """
    overlap_pass = _make_pass(config)
    if overlap_pass is None:
        return {}
    _watch_compiles()
    return _compose(overlap_pass, {})


def enable(config: OverlapConfig | None = None) -> None:
    """Install the pass for every `torch.compile` of this process, in all threads.

    A second call replaces the first. Without an initialized process group nothing can overlap;
    then a warning says so, and compiles after the group's initialization are served.

    Raises:
        UnsupportedTorchError, PluginError, ConfigError: as `inductor_options`.
    """
    overlap_pass = _make_pass(config)
    if overlap_pass is None:
        logger.info("overlap is off: OVERLAP_CORE=0")
        return
    if rank_and_world_size() is None:
        logger.warning(
            "overlap is off: no process group is initialized. Call "
            "torch.distributed.init_process_group before the first compiled call"
        )
    with session.lock:
        session.kept.passes[:] = [overlap_pass]
        _watch_compiles()


def disable() -> None:
    """Take back `enable` and every `enabled` around this call. What is compiled stays as it is."""
    with session.lock:
        session.kept.passes.clear()
        session.kept.off = ""


@contextmanager
def enabled(config: OverlapConfig | None = None) -> Iterator[None]:
    """Install the pass while a block runs, for code that calls `torch.compile` by itself.

    Compilation happens at the first call of a compiled function, so that call belongs into the
    block; a backward graph that is compiled later keeps the installation of its forward.

    Raises:
        UnsupportedTorchError, PluginError, ConfigError: as `inductor_options`.
    """
    overlap_pass = _make_pass(config)
    if overlap_pass is None:
        yield
        return
    with session.lock:
        session.kept.passes.append(overlap_pass)
        _watch_compiles()
    try:
        yield
    finally:
        with session.lock:
            session.kept.passes[:] = [one for one in session.kept.passes if one is not overlap_pass]


def _make_pass(config: OverlapConfig | None) -> OverlapPass | None:
    """What to install; None: the environment switches everything off."""
    try:
        if disabled_by_environment():
            _go_without("switched off by OVERLAP_CORE=0 in the environment")
            return None
        check_torch()
        config = OverlapConfig() if config is None else config
        overlap_pass = OverlapPass(config, PluginHost.discover(config))
    except Exception as error:
        _go_without(failure_in_words(error))
        raise
    overlap_again()
    with session.lock:
        session.kept.made[setting_of(config, overlap_pass.host)] = overlap_pass
    return overlap_pass


def _go_without(why: str) -> None:
    go_without(why)
    with suppress(AttributeError):  # in a torch that is not supported anything may be missing
        _watch_compiles()


def _compose(overlap_pass: OverlapPass, patches: dict[str, Any]) -> dict[str, Any]:
    """Options that add our pass behind those that are configured, and keep artifacts uncached.

    Args:
        overlap_pass: what to install.
        patches: options that the user gave; they win over Inductor's configuration.
    """
    gate = patches.get(_GATE, getattr(inductor_config, _GATE))
    configured = patches.get(_PASSES, getattr(inductor_config, _PASSES)) if gate else []
    others = [one for one in configured if not isinstance(one, OverlapPass)]
    options = {
        _GATE: True,
        _PASSES: [*others, overlap_pass],
        **with_numbering(patches, inductor_config),
    }
    if has_config_key(SIMPLE_OVERLAP_KEY):
        options[SIMPLE_OVERLAP_KEY] = False
    return options


def _watch_compiles() -> None:
    """Route `compile_fx` through `_compile_with_overlap`, once for the process."""
    with session.lock:
        if session.kept.original_compile_fx is not None:
            return
        original = compile_fx_module.compile_fx

        @functools.wraps(original)
        def compile_fx(*args: Any, **kwargs: Any) -> Any:
            return _compile_with_overlap(original, args, kwargs)

        session.kept.original_compile_fx = original
        compile_fx_module.compile_fx = compile_fx


def _compile_with_overlap(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    patches = dict(kwargs.get("config_patches") or {})
    active = _find_pass(patches.get(_PASSES, getattr(inductor_config, _PASSES, ())))
    off = session.kept.off
    if active is None and off and not session.kept.passes:
        tell_peers(off)  # of a job that has begun since
        return original(*args, **kwargs)
    if active is None and session.kept.passes and not disabled_by_environment() and len(args) < 4:
        with session.lock:
            active = session.kept.passes[-1] if session.kept.passes else None
        if active is not None:
            patches.update(_compose(active, patches))
            kwargs = {**kwargs, "config_patches": patches}
    deterministic = patches.get("deterministic", inductor_config.deterministic)
    if active is not None and deterministic and patches:
        why = (
            "Inductor runs no reorder pass while deterministic algorithms are on "
            "(torch.use_deterministic_algorithms, or Inductor's `deterministic`); switch them off "
            "to overlap"
        )
        logger.warning("overlap is off: %s", why)
        forget_other_job()
        add_record(_off(why))
    elif active is not None:
        tell_peers("")  # whatever came to nothing before
    with capturing(args[0] if args else kwargs.get("model_")):
        return original(*args, **kwargs)


def _find_pass(passes: Any) -> OverlapPass | None:
    return next((one for one in passes or () if isinstance(one, OverlapPass)), None)


def _off(why: str) -> RankOutcome:
    world = rank_and_world_size()
    rank = 0 if world is None else world[0]
    return RankOutcome(
        rank=rank,
        scope=(rank,),
        mode=Mode.ABORT,
        why=why,
        order=(),
        collectives=(),
        gathers=(),
        legal=True,
        committed=False,
    )
