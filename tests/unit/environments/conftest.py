"""The demo's environment over the shipped tokenizer, and a way to write turns as text."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from environments import registry
from environments.base import Environment

TOKENIZER_JSON = Path(__file__).parents[3] / "environments/search/policy/tokenizer.json"


@pytest.fixture(scope="session")
def tokenizer_json() -> bytes:
    return TOKENIZER_JSON.read_bytes()


@pytest.fixture(scope="session")
def search(tokenizer_json: bytes) -> Environment:
    return registry.create("search", {}, tokenizer_json)


@pytest.fixture(scope="session")
def write(tokenizer_json: bytes) -> Callable[[str], list[int]]:
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="session")
def read(tokenizer_json: bytes) -> Callable[[list[int]], str]:
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)
