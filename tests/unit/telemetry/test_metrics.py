"""Every metric the trainer records is declared once."""

import numpy as np
import pytest

from stoa.config.run import Alarms, Gate
from stoa.telemetry.metrics import CATALOGUE, FAMILIES, find
from tests.fakes import toy


def test_names_are_declared_once():
    names = [metric.name for metric in (*CATALOGUE, *FAMILIES)]
    assert len(set(names)) == len(names)


def test_a_metric_is_found_by_name_and_a_member_by_its_family():
    assert find("staleness_mean").unit == "versions"
    assert find("staleness_12").unit == "groups"
    assert find("would_drop_rate_dual_clip_tv").name == "would_drop_rate"
    assert find("staleness") is None
    assert find("nonsense") is None


def test_every_alarm_watches_a_declared_metric():
    assert all(find(name) in (*CATALOGUE, *FAMILIES) for name in Alarms.model_fields)


def test_every_metric_of_a_step_is_declared():
    metrics = pytest.importorskip("trainer_gpu.metrics")
    chance = np.random.default_rng(0)
    tokens = metrics.Tokens(*(-chance.random(9), -chance.random(9), chance.normal(size=9), chance.random(9)))
    found = {**metrics.token_metrics(tokens, Gate()), **metrics.group_metrics([toy.group()], 5, 3), **metrics.drop_metrics([], 1)}
    assert [name for name in found if find(name) is None] == []
