"""The list of what must be recorded, held against the catalogue and the alarms; a real step is held against it in test_engine."""

from itertools import chain

from stoa.config.run import Alarms
from stoa.telemetry.metrics import find
from tests.unit.trainer_gpu.recorded import (
    AFTER_A_VERSION,
    AFTER_ARRIVALS,
    ALARMS,
    EVERY_STEP,
    SOME_STEPS,
    WHEN_IT_HAPPENS,
    lacking_of_version,
)


def keys(*tables: object) -> list[str]:
    return [key for table in tables for key in chain.from_iterable(table.values())]  # pyright: ignore


def test_every_key_of_the_list_is_declared_with_its_unit() -> None:
    assert [
        key
        for key in keys(EVERY_STEP, SOME_STEPS, AFTER_ARRIVALS, AFTER_A_VERSION, WHEN_IT_HAPPENS)
        if find(key.rstrip("_") + "_0" * (key[-1] == "_")) is None
    ] == []
    assert lacking_of_version() == []


def test_every_alarm_of_the_list_has_a_bound_and_every_bound_is_on_the_list() -> None:
    assert sorted(keys(ALARMS)) == sorted(Alarms.model_fields)
