import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from metal.kernels import metal_works
from metal.router import RouterKernel, RouterRule, order_plain, route_plain


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
    experts, weights, record = route_plain(mx.array(logits), mx.eye(sizes[0]), mx.array(bias), rule)  # the logits are x itself
    wanted_experts, wanted_weights = slow_route(logits, bias, rule)
    np.testing.assert_array_equal(np.array(experts), wanted_experts)
    np.testing.assert_array_equal(np.array(record), wanted_experts)
    np.testing.assert_allclose(np.array(weights), wanted_weights, rtol=1e-5)


def test_equal_scores_go_to_the_lowest_index() -> None:
    experts, weights, _ = route_plain(mx.zeros((1, 6)), mx.eye(6), mx.array([0.0, 0.0, 0.1, 0.0, 0.1, 0.0]), RouterRule(6, 3, True, 1.0))
    assert np.array(experts).tolist() == [[2, 4, 0]]
    np.testing.assert_allclose(np.array(weights), [[1 / 3] * 3], rtol=1e-5)


def test_a_tokens_choice_does_not_depend_on_how_many_there_are() -> None:
    numbers = np.random.default_rng(0)
    x, gate = (mx.array(numbers.normal(0, 1, shape).astype(np.float32)) for shape in ((64, 48), (8, 48)))
    rule, bias = RouterRule(8, 2, True, 1.0), mx.zeros((8,))
    together = route_plain(x, gate, bias, rule)
    for row in (0, 17, 63):
        alone = route_plain(x[row : row + 1], gate, bias, rule)
        assert np.array(alone.weights).tobytes() == np.array(together.weights[row : row + 1]).tobytes()
        assert np.array(alone.record).tolist() == np.array(together.experts[row : row + 1]).tolist()


def test_places_are_ordered_by_expert_and_stay_in_order() -> None:
    order, offsets, counts = order_plain(mx.array([[2, 0], [0, 2], [3, 2]], dtype=mx.uint32), 4)
    assert np.array(order).tolist() == [1, 2, 0, 3, 5, 4]
    assert np.array(offsets).tolist() == [0, 2, 2, 5, 6]
    assert np.array(counts).tolist() == [2, 0, 3, 1]


def test_kernel_raises_where_there_is_no_metal_back_end() -> None:
    if metal_works():
        pytest.skip("this machine has a Metal back end")
    with pytest.raises(RuntimeError, match="Metal"):
        RouterKernel()(mx.zeros((4, 64)), mx.zeros((8, 64)), mx.zeros((8,)), RouterRule(8, 2, True, 1.0))
