"""The contract of an environment, on the demo's: ids in, ids out, a score that trusts nothing."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments import registry
from environments.base import Environment, EpisodeOverError, Limits, Reply
from environments.search.corpus import build_world
from stoa.contracts.errors import ConfigError, UnknownNameError

WORLD = {entity.id: entity for entity in build_world(0, 600)}
QUESTION = "e0400-regulates-1"
NAME, ANSWER = WORLD["e0400"].name, WORLD["e0400"].facts["regulates"]
WRONG = next(word for word in ("apoptosis", "secretion") if word != ANSWER)

Write = Callable[[str], list[int]]
Read = Callable[[object], str]


def call(query: str) -> str:
    return f'<|tool_call_start|>[search(query="{query}")]<|tool_call_end|><|im_end|>'


def answer(text: str) -> str:
    return f"Answer: {text}<|im_end|>"


def test_prompt_is_the_question_as_a_user_message(search: Environment, read: Read) -> None:
    assert search.question(QUESTION).text == f"{NAME} acts on which pathway ?"
    assert read(search.prompt_ids(QUESTION)) == (
        f"<|startoftext|> <|im_start|> user {NAME} acts on which pathway ? <|im_end|> <|im_start|> assistant"
    )


def test_search_result_is_appended_as_a_tool_message(search: Environment, write: Write, read: Read) -> None:
    reply = search.reply(QUESTION, [write(call(NAME))])
    assert (reply.done, reply.stop_reason) == (False, "")
    assert read(reply.ids) == f"<|im_start|> tool {WORLD['e0400'].abstract} <|im_end|> <|im_start|> assistant"


def test_search_then_right_answer_earns_one(search: Environment, write: Write) -> None:
    turns = [write(call(NAME)), write(answer(ANSWER))]
    assert search.reply(QUESTION, turns) == Reply((), True, "answered")
    outcome = search.score(QUESTION, turns)
    assert outcome.reward == 1.0
    assert outcome.parts == {
        "exact_match": 1.0,
        "cover": 1.0,
        "strict_cover": 1.0,
        "searched": 1.0,
        "num_calls": 1.0,
        "num_empty": 0.0,
        "malformed": 0.0,
        "answer_words": 1.0,
    }


def test_searches_that_find_nothing_are_counted(search: Environment, write: Write) -> None:
    """No abstract has the word of the second query, and the third has none."""
    turns = [write(call(NAME)), write(call("which")), write(call("?")), write(answer(ANSWER))]
    parts = search.score(QUESTION, turns).parts
    assert (parts["num_calls"], parts["num_empty"]) == (3.0, 2.0)
    assert search.score(QUESTION, turns[-1:]).parts["num_empty"] == 0.0


def test_guess_without_a_search_is_scored_as_such(search: Environment, write: Write) -> None:
    right, wrong = (search.score(QUESTION, [write(answer(word))]) for word in (ANSWER, WRONG))
    assert (right.reward, right.parts["searched"], wrong.reward) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"Answer: {ANSWER}",
        f"{ANSWER}<|im_end|>",
        f"Answer {ANSWER}<|im_end|>",
        "<|im_end|>",
        "<|tool_call_start|>search<|tool_call_end|><|im_end|>",
        f"Answer: {ANSWER}<|im_start|>tool<|im_end|>",
        call(NAME).replace("[search(query", "[lookup(query"),
        call(NAME).removesuffix("<|tool_call_end|><|im_end|>") + "<|im_end|>",
        f"Answer: {ANSWER} {'liver ' * 12}<|im_end|>",
    ],
)
def test_malformed_turn_ends_the_episode_with_nothing(search: Environment, write: Write, text: str) -> None:
    turns = [write(call(NAME)), write(text)]
    assert search.reply(QUESTION, turns) == Reply((), True, "malformed")
    outcome = search.score(QUESTION, turns)
    assert (outcome.reward, outcome.parts["malformed"], outcome.parts["strict_cover"]) == (0.0, 1.0, 0.0)
    assert outcome.parts["num_calls"] == 1.0


@pytest.mark.parametrize(("metric", "reward"), [("exact_match", 0.0), ("cover", 1.0), ("strict_cover", 0.0)])
def test_metric_that_trains_is_a_setting_and_all_are_reported(tokenizer_json: bytes, write: Write, metric: str, reward: float) -> None:
    environment = registry.create("search", {"reward": metric}, tokenizer_json)
    outcome = environment.score(QUESTION, [write(answer(f"{ANSWER} {WRONG}"))])
    assert outcome.reward == reward
    assert [outcome.parts[name] for name in ("exact_match", "cover", "strict_cover")] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("guess", ["apoptosis autophagy glycolysis angiogenesis inflammation secretion", "", "? .", "the"])
def test_list_or_empty_answer_earns_nothing(search: Environment, write: Write, guess: str) -> None:
    assert search.score(QUESTION, [write(answer(guess))]).reward == 0.0


def test_fourth_call_ends_the_episode(search: Environment, write: Write) -> None:
    turns = [write(call(NAME))] * 4
    assert [search.reply(QUESTION, turns[: k + 1]).done for k in range(4)] == [False, False, False, True]
    assert search.reply(QUESTION, turns).stop_reason == "call_limit"
    outcome = search.score(QUESTION, turns)
    assert (outcome.reward, outcome.parts["num_calls"], outcome.parts["malformed"]) == (0.0, 3.0, 0.0)


def test_episode_ends_where_another_turn_would_not_fit(tokenizer_json: bytes, write: Write) -> None:
    short = registry.create("search", {"max_episode_tokens": 64}, tokenizer_json)
    turns = [write(call("treats")), write(call("treats"))]
    first = short.reply(QUESTION, turns[:1])
    used = len(short.prompt_ids(QUESTION)) + len(turns[0]) + len(first.ids)
    assert not first.done and used + 12 <= 64
    assert short.reply(QUESTION, turns) == Reply((), True, "token_limit")


def test_unfinished_episode_earns_nothing(search: Environment, write: Write) -> None:
    assert search.score(QUESTION, [write(call(NAME))]).reward == 0.0


def test_turns_after_the_end_are_refused(search: Environment, write: Write) -> None:
    for turns in ([write(answer(WRONG)), write(answer(ANSWER))], [[], write(answer(ANSWER))], []):
        with pytest.raises(EpisodeOverError):
            search.reply(QUESTION, turns)
        with pytest.raises(EpisodeOverError):
            search.score(QUESTION, turns)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_sampled_ids_raise_and_two_environments_agree(
    search: Environment, tokenizer_json: bytes, write: Write, data: st.DataObject
) -> None:
    other = registry.create("search", {}, tokenizer_json) if not _OTHERS else _OTHERS[0]
    _OTHERS[:] = [other]
    scripts = st.sampled_from([write(call(NAME)), write(call("treats")), write(answer(ANSWER)), write(call(""))])
    noise = st.lists(st.integers(0, 255), max_size=12)
    turns: list[list[int]] = []
    ids = list(search.prompt_ids(QUESTION))
    for _ in range(search.limits.max_turns + 1):
        turns.append(data.draw(scripts | noise))
        ids += turns[-1]
        reply = search.reply(QUESTION, turns)
        assert reply == other.reply(QUESTION, turns)
        assert search.score(QUESTION, turns) == other.score(QUESTION, turns)
        ids += reply.ids
        if reply.done:
            assert not reply.ids
            break
        assert len(ids) + search.limits.max_turn_tokens <= search.limits.max_episode_tokens
    assert reply.done


_OTHERS: list[Environment] = []


def test_limits_and_stop_ids_follow_the_settings(tokenizer_json: bytes, write: Write) -> None:
    environment = registry.create("search", {"max_calls": 2, "max_turn_tokens": 20}, tokenizer_json)
    assert environment.limits == Limits(3, 20, 192)
    assert environment.stop_ids == frozenset(write("<|im_end|>"))


def test_no_episode_of_the_demo_can_outgrow_its_limits(search: Environment) -> None:
    longest = max(len(search.prompt_ids(q)) for q in search.question_ids("train"))
    result = 5 + 2 * 12
    assert longest + 3 * (12 + result) + 12 <= search.limits.max_episode_tokens


def test_unknown_question_names_the_nearest(search: Environment) -> None:
    with pytest.raises(UnknownNameError) as caught:
        search.question("e0400-regulates-2")
    assert "did you mean e0400-regulates-" in caught.value.hint


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("num_heldout", 200, "num_held_out"),
        ("top_k", "2", "2"),
        ("max_calls", True, "3"),
        ("top_k", 0, "from 1 to"),
        ("reward", "covers", "cover"),
        ("num_held_out", 600, "from 1 to 599"),
        ("world_seed", 1_000_000, "999999"),
        ("world_seed", -1, "from 0"),
    ],
)
def test_bad_setting_is_refused_with_what_to_write(tokenizer_json: bytes, key: str, value: object, hint: str) -> None:
    with pytest.raises(ConfigError, match=key) as caught:
        registry.create("search", {key: value}, tokenizer_json)  # pyright: ignore[reportArgumentType]
    assert hint in caught.value.hint
