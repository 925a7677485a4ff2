"""A run that got what it was started for is told from one whose time was over."""

import pytest

from cli.follow import reached
from stoa.config.run import Stop
from tests.unit.cli.records import record


@pytest.mark.parametrize(
    ("stop", "done"),
    [
        (Stop(max_steps=4), True),
        (Stop(max_steps=5), False),
        (Stop(max_steps=0, max_versions=2), True),
        (Stop(max_steps=0, max_versions=3), False),
        (Stop(max_steps=96, target_pass_at_1=0.8), True),
        (Stop(max_steps=96, target_pass_at_1=0.81), False),
        (Stop(max_steps=0, max_minutes=1.0), False),
    ],
)
def test_reached(stop: Stop, done: bool) -> None:
    assert reached(stop, record()) is done
