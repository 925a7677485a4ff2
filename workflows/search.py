"""Search attributes as workflows set them: only what has changed, one event for all."""

from typing import Any

from temporalio import workflow
from temporalio.common import SearchAttributeKey, SearchAttributeUpdate

from stoa.contracts import names


def upsert(values: dict[str, str | int | float], shown: dict[str, str | int | float]) -> None:
    """Set the attributes of `values` that differ from `shown`, and note them there."""
    changed = {name: value for name, value in values.items() if shown.get(name) != value}
    if changed:
        shown.update(changed)
        workflow.upsert_search_attributes([_update(name, value) for name, value in changed.items()])


def _update(name: str, value: str | int | float) -> SearchAttributeUpdate[Any]:
    match names.SEARCH_ATTRIBUTES[name]:
        case "Int":
            return SearchAttributeKey.for_int(name).value_set(int(value))
        case "Double":
            return SearchAttributeKey.for_float(name).value_set(float(value))
        case _:
            return SearchAttributeKey.for_keyword(name).value_set(str(value))
