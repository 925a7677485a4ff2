"""Environments by name, proved with the smallest one."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from environments import registry
from environments.base import Environment, EpisodeOverError
from stoa.contracts.errors import CheckpointError, UnknownNameError

BUILT_IN = ("copy_word", "papersearchqa", "search")


@pytest.fixture(scope="module")
def copy_word(tokenizer_json: bytes) -> Environment:
    return registry.create("copy_word", {"max_turn_tokens": 3}, tokenizer_json)


def test_environments_are_known_by_name(tokenizer_json: bytes) -> None:
    assert registry.names() == ["copy_word", "papersearchqa", "search", "verifiers"]
    for name in BUILT_IN:
        environment = registry.create(name, {}, tokenizer_json)
        assert environment.name == name
        train, held_out = environment.question_ids("train"), environment.question_ids("held_out")
        assert train and held_out and not set(train) & set(held_out)
        assert environment.question(held_out[0]).split == "held_out"


def test_unknown_environment_names_the_nearest(tokenizer_json: bytes) -> None:
    with pytest.raises(UnknownNameError, match="serch") as caught:
        registry.create("serch", {}, tokenizer_json)
    assert caught.value.hint == "did you mean search?"


def test_tokenizer_of_another_family_is_refused(tokenizer_json: bytes) -> None:
    foreign = tokenizer_json.replace(b"<|im_start|>", b"<start_of_turn>")
    for name in BUILT_IN:
        with pytest.raises(CheckpointError, match="im_start"):
            registry.create(name, {}, foreign)


def test_copy_word_pays_for_the_word_alone(copy_word: Environment, write: Callable[[str], list[int]]) -> None:
    right, wrong, open_ended = write("brain<|im_end|>"), write("liver<|im_end|>"), write("brain brain brain")
    assert [copy_word.score("brain", [turn]).reward for turn in (right, wrong, open_ended)] == [1.0, 0.0, 0.0]
    assert copy_word.reply("brain", [open_ended]).stop_reason == "malformed"
    assert copy_word.score("brain", [open_ended]).parts["malformed"] == 1.0
    with pytest.raises(EpisodeOverError):
        copy_word.reply("brain", [right, right])
    with pytest.raises(UnknownNameError):
        copy_word.prompt_ids("spleen")


def test_environments_load_no_engine_and_no_pydantic() -> None:
    program = (
        "import sys; from environments import registry; "
        "print([m for m in ('torch', 'mlx', 'transformers', 'pydantic', 'temporalio', 'boto3') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
