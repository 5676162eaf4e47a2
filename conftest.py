"""How tests are shared out when pytest-xdist runs them on several workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep each file on one worker, and all that share living ranks on one; what is long is first.

    Works with `--dist loadgroup --no-loadscope-reorder`.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    items.sort(key=_length)
    for item in items:
        group = "pool" if _is_pooled(item) else item.path.relative_to(config.rootpath).as_posix()
        item.add_marker(pytest.mark.xdist_group(group))


def _length(item: pytest.Item) -> int:
    marks: Sequence[bool] = (
        _is_pooled(item),
        item.get_closest_marker("ranks") is not None,
        item.get_closest_marker("hypothesis") is not None,
        True,
    )
    return marks.index(True)


def _is_pooled(item: pytest.Item) -> bool:
    return "pooled_ranks" in getattr(item, "fixturenames", ())
