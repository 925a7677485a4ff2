"""Environments by name. To add one, write its file and name it here; nothing else changes."""

from collections.abc import Callable, Mapping

from environments import copy_word, verifiers_v1
from environments.base import Environment, Setting, unknown_name
from environments.papersearchqa import env as papersearchqa
from environments.search import env as search

_BUILDERS: dict[str, Callable[[Mapping[str, Setting], bytes], Environment]] = {
    search.NAME: search.create,
    copy_word.NAME: copy_word.create,
    papersearchqa.NAME: papersearchqa.create,
    verifiers_v1.NAME: verifiers_v1.create,
}


def names() -> list[str]:
    """The names `create` knows."""
    return sorted(_BUILDERS)


def create(name: str, settings: Mapping[str, Setting], tokenizer_json: bytes) -> Environment:
    """Build an environment for the checkpoint whose tokenizer.json is given.

    Raises UnknownNameError, ConfigError (a bad setting) or CheckpointError (a tokenizer without the chat tokens).
    """
    builder = _BUILDERS.get(name)
    if builder is None:
        raise unknown_name("environment", name, names())
    return builder(settings, tokenizer_json)
