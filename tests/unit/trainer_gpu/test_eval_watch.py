"""Held-out results read from a real bucket: which is the start, what is below it, and what is told once."""

from stoa.bucket import keys
from stoa.bucket.evals import write_summary
from stoa.bucket.store import Store
from stoa.contracts.evaluation_messages import EvaluationResult
from stoa.learning.marks import wilson_95
from trainer_gpu.eval_watch import NONE_SEEN, EvalWatch


def put(store: Store, version: int, num_right: int, *, name: str = "", error: str = "") -> None:
    evaluation = name or f"v{version}"
    key = keys.eval_summary("test", version, evaluation)
    result = EvaluationResult("test", evaluation, version, 100, num_right / 100, wilson_95(num_right, 100), 0.5, key=key, error=error)
    write_summary(store, result, ())


def test_results_below_the_start_by_more_than_their_interval_are_told_once(store: Store) -> None:
    watch = EvalWatch(store, "test")
    assert watch.news(NONE_SEEN) == {}
    put(store, 0, 50, name="v0-first")
    assert watch.news(NONE_SEEN) == {"eval_version": 0.0, "eval_pass_at_1": 0.5}
    assert watch.news(0.0) == {}
    put(store, 4, 45)
    found = watch.news(0.0)
    assert found["eval_fall"] < 0, "within its interval"
    assert "eval_fall_twice" not in found
    put(store, 8, 30)
    found = watch.news(4.0)
    assert 0.10 < found["eval_fall"] < 0.12, "0.5 - 0.396, the upper end of Wilson's interval of 30 of 100"
    assert found["eval_fall_twice"] < 0
    put(store, 12, 20)
    put(store, 16, 0, error="100 questions have no episode")
    found = EvalWatch(store, "test").news(8.0)
    assert found["eval_version"] == 12.0
    assert found["eval_fall_twice"] == 0.5 - wilson_95(30, 100)[1]
    assert EvalWatch(store, "other").news(NONE_SEEN) == {}


def test_damaged_summary_is_passed_over(store: Store) -> None:
    watch = EvalWatch(store, "test")
    store.create(keys.eval_summary("test", 0, "v0"), b"{}")
    assert watch.news(NONE_SEEN) == {}
    put(store, 4, 50)
    assert watch.news(NONE_SEEN)["eval_version"] == 4.0
