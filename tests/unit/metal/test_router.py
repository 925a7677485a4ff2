import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from metal.kernels import Kernel, Switch, metal_works
from metal.router import Router, RouterRule, route_kernel, route_plain, self_test, tied_case


def slow_route(logits: np.ndarray, bias: np.ndarray, rule: RouterRule) -> tuple[np.ndarray, np.ndarray]:
    """One token at a time: the largest biased score first, the lower index first among equals."""
    experts, weights = [], []
    for row in logits:
        scores = np.array(mx.sigmoid(mx.array(row)))
        order = sorted(range(rule.num_experts), key=lambda expert: (-(scores[expert] + bias[expert]), expert))[: rule.top_k]
        chosen = scores[order].astype(np.float64)
        experts.append(order)
        weights.append(chosen / (chosen.sum() + 1e-6) * rule.scale if rule.normalise else chosen * rule.scale)
    return np.array(experts), np.array(weights)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([(8, 2), (32, 4), (5, 5), (64, 6)]),
    st.booleans(),
    st.sampled_from([1.0, 2.5]),
    st.data(),
)
def test_plain_ops_choose_and_weigh_as_written_out_by_hand(
    sizes: tuple[int, int], normalise: bool, scale: float, data: st.DataObject
) -> None:
    rule = RouterRule(*sizes, normalise, scale)
    coarse = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 0.5, 1.0])  # few values: many exact ties
    logits = data.draw(hnp.arrays(np.float32, (4, sizes[0]), elements=coarse))
    bias = data.draw(hnp.arrays(np.float32, sizes[0], elements=st.sampled_from([0.0, 0.25, 0.5])))
    experts, weights = route_plain(mx.array(logits), mx.array(bias), rule)
    wanted_experts, wanted_weights = slow_route(logits, bias, rule)
    np.testing.assert_array_equal(np.array(experts), wanted_experts)
    np.testing.assert_allclose(np.array(weights), wanted_weights, rtol=1e-5)


def test_equal_scores_go_to_the_lowest_index() -> None:
    experts, weights = route_plain(mx.zeros((1, 6)), mx.array([0.0, 0.0, 0.1, 0.0, 0.1, 0.0]), RouterRule(6, 3, True, 1.0))
    assert np.array(experts).tolist() == [[2, 4, 0]]
    np.testing.assert_allclose(np.array(weights), [[1 / 3] * 3], rtol=1e-5)


def test_kernel_raises_where_there_is_no_metal_back_end() -> None:
    if metal_works():
        pytest.skip("this machine has a Metal back end")
    kernel = Kernel("router", inputs=("logits", "bias", "scale"), outputs=("experts", "weights"))
    logits, bias = tied_case(4, 8)
    with pytest.raises(RuntimeError, match="Metal"):
        mx.eval(route_kernel(kernel, logits, bias, RouterRule(8, 2, True, 1.0)))


def test_router_without_metal_uses_plain_ops_and_says_so() -> None:
    router = Router(RouterRule(8, 2, True, 1.0), available=lambda: False)
    logits, bias = tied_case(16, 8)
    experts, _ = router(logits, bias)
    assert not router.switch.uses_kernel
    assert router.switch.reason == "no Metal back end"
    np.testing.assert_array_equal(np.array(experts), np.array(route_plain(logits, bias, router.rule)[0]))


def test_kernel_that_does_not_run_is_never_used() -> None:
    if metal_works():
        pytest.skip("this machine has a Metal back end")
    # The machine claims Metal, but the first call of the self-test fails.
    router = Router(RouterRule(8, 2, True, 1.0), available=lambda: True)
    assert not router.switch.uses_kernel
    assert router.switch.reason.startswith("does not run")
    logits, bias = tied_case(16, 8)
    assert router(logits, bias)[0].shape == (16, 2)


def fake_kernel(change: str):
    """A kernel that computes with plain ops, rightly or with one planted fault."""

    def call(*, inputs, template, **_):
        logits, bias, scale = inputs
        values = dict(template)
        rule = RouterRule(values["E"], values["K"], values["NORMALISE"], float(scale[0].item()))
        experts, weights = route_plain(logits, bias, rule)
        if change == "highest index of equals":
            reverse = route_plain(logits[:, ::-1], bias[::-1], rule)
            experts, weights = values["E"] - 1 - reverse[0], reverse[1]
        if change == "weights with bias":
            weights = weights + mx.take_along_axis(mx.broadcast_to(bias, logits.shape), experts, axis=-1)
        if change == "scale forgotten":
            weights = weights / scale
        return [experts, weights]

    return call


def test_self_test_accepts_a_kernel_that_agrees() -> None:
    assert self_test(fake_kernel("")) == ""


@pytest.mark.parametrize(
    ("fault", "found"),
    [("highest index of equals", "experts"), ("weights with bias", "weights"), ("scale forgotten", "weights")],
)
def test_self_test_finds_a_planted_fault(fault: str, found: str) -> None:
    assert f"other {found}" in self_test(fake_kernel(fault))


def test_switch_uses_the_kernel_only_after_its_self_test_agreed() -> None:
    agreed = Switch("k", available=lambda: True, self_test=lambda: "")
    refused = Switch("k", available=lambda: True, self_test=lambda: "other experts")
    assert (agreed.uses_kernel, agreed.reason) == (True, "")
    assert (refused.uses_kernel, refused.reason) == (False, "other experts")
