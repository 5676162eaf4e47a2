"""The name under which ranks meet: the function, whatever was compiled before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.external_utils import wrap_inline
from torch._inductor.virtualized import V

from overlap_core.inductor.identity import identify

if TYPE_CHECKING:
    from collections.abc import Callable


def look(snodes: list[Any]) -> str:
    return identify(V.graph)


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_outermost_function_of_the_user_names_the_graph(
    capture: Callable[..., list[Any]], model: Any, arguments: Any, wrapped: bool
) -> None:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))  # another frame number
    fn = wrap_inline(model) if wrapped else model
    with torch.no_grad():
        [captured] = capture(fn, *arguments, look=look)
    place, direction, name = captured.seen.rsplit("/", 2)
    assert place.startswith("inductor/conftest.py:")
    assert place.endswith(":model.<locals>.run")
    assert (direction, name) == ("inference", "main")


def test_a_module_of_torch_is_named_by_its_own_forward(
    capture: Callable[..., list[Any]], gather: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    class Gathered(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x) @ gather(self.weight)

    model = torch.nn.Sequential(Gathered(32, 8))
    with torch.no_grad():
        [captured] = capture(model, torch.ones(32, 32), look=look)
    assert "container.py" in captured.seen or "Gathered.forward" in captured.seen
