"""Registering ops: names, conflicts, and what a replay hook may return."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import overlap_core as oc
from overlap_core.errors import RegistrationError
from overlap_core.registry import OpRegistry, canonical_op_name, registry_digest


def first(q: Any, sizes: Any) -> tuple[Any, ...]:
    return q, [1, 2]


def second(q: Any, sizes: Any) -> None: ...


@pytest.mark.parametrize("form", ["regt::forms", "regt.forms", "regt::forms.default"])
def test_every_way_to_write_a_name_means_one_op(form: str) -> None:
    oc.register_materialize_inputs(form, first, has_internal_collective=True)
    for name in ("regt::forms", "regt.forms", "regt::forms.default", "regt.forms.default"):
        assert oc.get_materialize_inputs_hook(name) is first
        assert oc.op_has_internal_collective(name)
    assert oc.op_has_internal_collective("torch.ops.regt.forms.default")


@pytest.mark.parametrize("name", ["", "op", "a::b::c", "ns::", "::op", "n s::op", "1a::b", 3, None])
def test_malformed_names_are_refused(name: Any) -> None:
    with pytest.raises(RegistrationError, match="expected a name such as 'mylib::attn'"):
        oc.register_materialize_inputs(name, first)


def test_an_overload_cannot_be_registered() -> None:
    with pytest.raises(RegistrationError, match=r"register the op itself, 'aten::mm', not .*'out'"):
        oc.register_materialize_inputs("aten.mm.out", first)


@pytest.mark.parametrize("name", ["", "triton_poi_fused_add_0", "regt::nobody", "a b"])
def test_looking_up_anything_else_finds_nothing(name: str) -> None:
    assert oc.get_materialize_inputs_hook(name) is None
    assert not oc.op_has_internal_collective(name)


def test_canonical_names_drop_the_overload() -> None:
    assert canonical_op_name("aten.mm.out") == "aten::mm"
    assert canonical_op_name("fused") is None


def test_a_second_hook_is_refused_and_names_both() -> None:
    oc.register_materialize_inputs("regt::twice", first)
    oc.register_materialize_inputs("regt::twice", first)
    with pytest.raises(RegistrationError, match=r"'regt::twice' .*:first; .*:second is another"):
        oc.register_materialize_inputs("regt::twice", second)
    assert oc.get_materialize_inputs_hook("regt.twice") is first


def test_a_reloaded_module_registers_the_same_again() -> None:
    source = "def hook(x): return None\nlater = lambda x: x"
    one: dict[str, Any] = {"__name__": "regt_module"}
    two = dict(one)
    exec(source, one)
    exec(source, two)
    for name in ("hook", "later"):
        oc.register_materialize_inputs(f"regt::reload_{name}", one[name])
        oc.register_materialize_inputs(f"regt::reload_{name}", two[name])


def test_two_lambdas_are_two_hooks() -> None:
    oc.register_materialize_inputs("regt::lambdas", lambda x: None)
    with pytest.raises(RegistrationError, match="is another one"):
        oc.register_materialize_inputs("regt::lambdas", lambda x: (x,))


def test_flag_and_hook_only_ever_grow() -> None:
    oc.register_materialize_inputs("regt::grow", has_internal_collective=True)
    assert oc.get_materialize_inputs_hook("regt::grow") is None
    oc.register_materialize_inputs("regt::grow", first)
    oc.register_materialize_inputs("regt::grow")
    assert oc.op_has_internal_collective("regt::grow")
    assert oc.get_materialize_inputs_hook("regt::grow") is first


def test_as_a_decorator() -> None:
    @oc.register_materialize_inputs("regt::decorated", has_internal_collective=True)
    def hook(x: int) -> None: ...

    assert oc.get_materialize_inputs_hook("regt::decorated") is hook


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fn": 3}, "materialize_inputs=3 is not a function"),
        ({"has_internal_collective": "yes"}, "has_internal_collective='yes': expected True"),
    ],
)
def test_values_of_another_kind_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        oc.register_materialize_inputs("regt::kinds", **arguments)


def test_a_plugin_may_register_its_own_anew_but_not_twice_at_once() -> None:
    OpRegistry("mine").register("regt::owned", lambda x: None)
    again = OpRegistry("mine")
    again.register("regt::owned", lambda x: (x,))
    with pytest.raises(RegistrationError, match="is another one"):
        again.register("regt::owned", lambda x: [x])
    with pytest.raises(RegistrationError, match="is another one"):
        OpRegistry("yours").register("regt::owned", lambda x: (x, x))


def test_a_custom_op_is_torchs_and_ours() -> None:
    @oc.register_custom_op("regt::double", materialize_inputs=first, has_internal_collective=True)
    def double(q: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        return q * 2

    @double.register_fake
    def _(q: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        return torch.empty_like(q)

    x = torch.ones(3)
    assert torch.equal(torch.ops.regt.double(x, [1]), x * 2)
    torch.library.opcheck(double, (x, [1]), test_utils=("test_schema", "test_faketensor"))
    assert oc.op_has_internal_collective(str(torch.ops.regt.double.default))


def test_a_custom_op_can_be_defined_again() -> None:
    for factor in (2, 3):

        @oc.register_custom_op("regt::again", materialize_inputs=first)
        def again(q: torch.Tensor, sizes: list[int]) -> torch.Tensor:
            return q * factor  # noqa: B023  called in this round only

        assert again(torch.ones(1), [1]).item() == factor


def test_a_refused_custom_op_is_not_defined_in_torch() -> None:
    oc.register_materialize_inputs("regt::refused", first)
    with pytest.raises(RegistrationError, match="is another one"):

        @oc.register_custom_op("regt::refused", materialize_inputs=second)
        def refused(q: torch.Tensor, sizes: list[int]) -> None: ...

    assert not hasattr(torch.ops.regt, "refused")


def test_a_custom_op_that_torch_refuses_is_not_registered() -> None:
    with pytest.raises(ValueError, match="type annotation"):

        @oc.register_custom_op("regt::untyped", has_internal_collective=True)
        def untyped(q): ...  # type: ignore[no-untyped-def]

    assert not oc.op_has_internal_collective("regt::untyped")


def test_a_hook_must_take_the_ops_arguments() -> None:
    message = r"'regt::short': materialize_inputs .*:first\(q.*sizes.*does not take .*own sign"
    with pytest.raises(RegistrationError, match=message):

        @oc.register_custom_op("regt::short", materialize_inputs=first)
        def short(q: torch.Tensor) -> None: ...


def test_applying_a_hook() -> None:
    assert oc.apply_materialize_inputs(second, ("q", "s"), {}) == (("q", "s"), {})
    assert oc.apply_materialize_inputs(first, ("q", "s"), {}) == (("q", [1, 2]), {})
    assert oc.apply_materialize_inputs(lambda *a: [*a, 3], [1], {}) == ((1, 3), {})


def test_a_result_covers_what_could_have_been_positional() -> None:
    def hook(q: int, sizes: int, *, scale: int) -> tuple[int, ...]:
        return q, 7

    assert oc.apply_materialize_inputs(hook, (1,), {"sizes": 2, "scale": 3}) == (
        (1, 7),
        {"scale": 3},
    )


@pytest.mark.parametrize("result", [0, False, "ab", {"q": 1}, torch.ones(2), iter(())])
def test_any_other_result_is_refused(result: Any) -> None:
    def hook(q: Any) -> Any:
        return result

    expected = rf"<locals>.hook returned {type(result).__name__}: expected None, or a tuple or list"
    with pytest.raises(RegistrationError, match=expected):
        oc.apply_materialize_inputs(hook, (1,), {})


def test_what_a_hook_raises_passes() -> None:
    def hook(q: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        oc.apply_materialize_inputs(hook, (1,), {})


def test_the_digest_follows_names_hooks_and_flags() -> None:
    seen = [registry_digest()]
    for change in (
        lambda: oc.register_materialize_inputs("regt::digest"),
        lambda: oc.register_materialize_inputs("regt::digest", first),
        lambda: oc.register_materialize_inputs("regt::digest", has_internal_collective=True),
    ):
        change()
        seen.append(registry_digest())
        change()
        assert registry_digest() == seen[-1]
    assert len(set(seen)) == 4
