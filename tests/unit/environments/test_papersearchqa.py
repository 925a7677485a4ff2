"""PaperSearchQA as an environment, over the shipped invented set and a tokenizer whose special ids stand elsewhere."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from environments import registry
from environments.base import Environment, EpisodeOverError, Reply
from environments.papersearchqa.prompts import CORRECTION, answer_of
from environments.papersearchqa.questions import SMALL, folder_id, small_index
from environments.search.paper_index import PaperIndex
from environments.search.retrieval import LocalRetriever
from environments.search.serve import SearchServer
from stoa.chat.render import ChatRenderer
from stoa.contracts.errors import ConfigError, FormatError, InfrastructureFaultError, UnknownNameError
from tests.unit.chat.conftest import SPECIAL, character_tokenizer

LIMITS = {"max_turn_tokens": 600, "max_episode_tokens": 20_000}
TOKENIZER: Tokenizer = character_tokenizer((*SPECIAL, "<think>", "</think>"))
TOKENIZER_JSON = TOKENIZER.to_str().encode()
Write = Callable[[str], list[int]]


def write(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def read(ids: tuple[int, ...]) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=False)


def call(query: str) -> list[int]:
    return write(f"<think>Look it up.</think><|tool_call_start|>[search(query='{query}')]<|tool_call_end|><|im_end|>")


def answer(text: str) -> list[int]:
    return write(f"<think>So it is.</think>Answer: {text}<|im_end|>")


@pytest.fixture(scope="module")
def papers() -> Environment:
    return registry.create("papersearchqa", LIMITS, TOKENIZER_JSON)


@pytest.fixture(scope="module")
def asked(papers: Environment) -> str:
    """A held-out question whose first accepted answer is one ASCII word."""
    return next(q for q in papers.question_ids("held_out") if papers.question(q).answers[0].isalnum())


def test_shipped_set_has_three_splits_that_share_no_paper(papers: Environment) -> None:
    ids = {split: papers.question_ids(split) for split in ("train", "held_out", "transfer")}  # pyright: ignore
    assert [len(found) for found in ids.values()] == [300, 200, 40]
    sources = [{papers.question(q).source for q in found} for found in ids.values()]
    assert not sources[0] & sources[1] and not sources[0] & sources[2]
    assert papers.question(ids["transfer"][0]).split == "transfer"


def test_prompt_names_the_tool_and_ends_where_the_policy_begins(papers: Environment, asked: str) -> None:
    prompt = read(papers.prompt_ids(asked))
    head, _, tail = prompt.partition("<|im_end|>\n")
    assert head.startswith("<|startoftext|><|im_start|>system\nYou answer questions")
    assert 'List of tools: [{"name": "search"' in head and "at most 4 searches" in head
    assert tail == f"<|im_start|>user\n{papers.question(asked).text}<|im_end|>\n<|im_start|>assistant\n"


def test_search_finds_the_paper_and_the_right_answer_is_paid(papers: Environment, asked: str) -> None:
    question = papers.question(asked)
    turns = [call(question.text)]
    reply = papers.reply(asked, turns)
    found = read(reply.ids)
    assert found.startswith("\n<|im_start|>tool\n[1] TITLE: ") and found.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert question.answers[0] in found
    turns.append(answer(question.answers[0]))
    assert papers.reply(asked, turns) == Reply((), True, "answered")
    outcome = papers.score(asked, turns)
    assert outcome.reward == 1.0
    assert outcome.parts == {
        "exact_match": 1.0, "cover": 1.0, "strict_cover": 1.0, "searched": 1.0, "num_calls": 1.0, "num_empty": 0.0, "malformed": 0.0,
        "num_malformed": 0.0, "truncated": 0.0, "too_long": 0.0, "answer_words": 1.0,
    }  # fmt: skip


def test_passages_are_cut_to_the_setting_and_counted_by_rank(asked: str) -> None:
    short = registry.create("papersearchqa", {**LIMITS, "max_passage_chars": 30, "top_k": 2}, TOKENIZER_JSON)
    found = read(short.reply(asked, [call(short.question(asked).text)]).ids)
    lines = found.removeprefix("\n<|im_start|>tool\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n").split("\n\n")
    assert [line[:4] for line in lines] == ["[1] ", "[2] "] and all(len(line) == 34 for line in lines)
    assert "No abstract was found." in read(short.reply(asked, [call("???")]).ids)
    parts = short.score(asked, [call("???"), call(short.question(asked).text), answer("insulin")]).parts
    assert (parts["num_calls"], parts["num_empty"]) == (2.0, 1.0)


@pytest.mark.parametrize(
    "bad",
    [
        "I do not know.<|im_end|>",
        "Answer:<|im_end|>",
        "Answer: insulin\nor so<|im_end|>",
        "<|tool_call_start|>[search(query='cut)]<|tool_call_end|><|im_end|>",
        "<|tool_call_start|>[search(query='a', n=3)]<|tool_call_end|><|im_end|>",
        "<|tool_call_start|>[lookup(query='a')]<|tool_call_end|><|im_end|>",
        '<|tool_call_start|>{"name": "search", "arguments": {"query": "\\ud800"}}<|tool_call_end|><|im_end|>',
        "<think>no end Answer: insulin<|im_end|>",
        f"{'long ' * 130}\nAnswer: insulin<|im_end|>",
    ],
)
def test_malformed_turn_gets_one_defined_answer_once_and_is_counted(papers: Environment, asked: str, bad: str) -> None:
    right = answer(papers.question(asked).answers[0])
    reply = papers.reply(asked, [write(bad)])
    assert read(reply.ids) == f"\n<|im_start|>tool\n{CORRECTION.content}<|im_end|>\n<|im_start|>assistant\n"
    after = papers.score(asked, [write(bad), right])
    assert (after.reward, after.parts["num_malformed"], after.parts["malformed"]) == (1.0, 1.0, 0.0)
    again = [write(bad), write(bad)]
    assert papers.reply(asked, again) == Reply((), True, "malformed")
    assert papers.score(asked, again).parts["num_malformed"] == 2.0
    with pytest.raises(EpisodeOverError):
        papers.reply(asked, [*again, right])


def test_truncated_turn_ends_the_episode(papers: Environment, asked: str) -> None:
    turns = [write("<think>and so on")]
    assert papers.reply(asked, turns) == Reply((), True, "malformed")
    assert papers.score(asked, turns).parts["truncated"] == 1.0


def test_only_the_last_turns_sampled_text_can_be_the_answer(papers: Environment, asked: str) -> None:
    gold = papers.question(asked).answers[0]
    inside = write(f"<think>Answer: {gold}</think>Answer: insulin<|im_end|>")
    searched = [call(papers.question(asked).text), answer("insulin")]
    early = [write(f"Answer: {gold}\n<|tool_call_start|>[search(query='x')]<|tool_call_end|><|im_end|>"), answer("insulin")]
    for turns in ([inside], searched, early):
        assert papers.score(asked, turns).parts["cover"] == 0.0


def test_long_answers_and_lists_earn_nothing_in_any_way_that_trains(papers: Environment, asked: str) -> None:
    gold = papers.question(asked).answers[0]
    long = papers.score(asked, [answer(f"{gold} {'word ' * 16}")])
    assert (long.parts["too_long"], long.parts["cover"], long.reward) == (1.0, 0.0, 0.0)
    for said in (f"not {gold}", f"{gold} or insulin", f"{gold}, insulin, leptin"):
        outcome = papers.score(asked, [answer(said)])
        assert (outcome.reward, outcome.parts["cover"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Answer: insulin", "insulin"),
        ("I think so.\n\n**Answer:** insulin", "insulin"),
        ("answer : `IL-10`", "IL-10"),
        ("Answer: a\nAnswer: b", "b"),
        ("Answer: beta (\N{GREEK SMALL LETTER BETA})", "beta (\N{GREEK SMALL LETTER BETA})"),
        ("The answer is: insulin", None),
        ("Answer:", None),
        ("Answer: ?!", None),
        ("", None),
    ],
)
def test_answer_is_the_last_line_after_its_mark(text: str, found: str | None) -> None:
    assert answer_of(text) == found


def test_calls_are_limited_and_the_budget_of_tokens_holds(papers: Environment, asked: str) -> None:
    turns = [call("renal")] * 5
    assert papers.reply(asked, turns) == Reply((), True, "call_limit")
    short = registry.create("papersearchqa", {**LIMITS, "max_episode_tokens": 4000}, TOKENIZER_JSON)
    assert short.reply(asked, [call("renal")]).stop_reason == "token_limit"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_sampled_ids_raise(papers: Environment, asked: str, data: st.DataObject) -> None:
    special = write("".join(f"{name}" for name in (*SPECIAL, "<think>", "</think>")))
    noise = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1) | st.sampled_from(special), max_size=30)
    query = st.text(max_size=20).map(lambda text: write(f"<|tool_call_start|>[search(query={text!r})]<|tool_call_end|><|im_end|>"))
    turns: list[list[int]] = []
    for _ in range(papers.limits.max_turns):
        turns.append(data.draw(noise | query))
        reply = papers.reply(asked, turns)
        papers.score(asked, turns)
        if reply.done:
            break
    assert reply.done or len(turns) == papers.limits.max_turns


@pytest.fixture
def served() -> Iterator[SearchServer]:
    with SearchServer(("127.0.0.1", 0), LocalRetriever(small_index())) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_server_gives_the_same_episode_and_its_outage_is_no_wrong_answer(papers: Environment, asked: str, served: SearchServer) -> None:
    index_id = PaperIndex(small_index()).about.index_id
    url = f"http://127.0.0.1:{served.server_address[1]}"
    remote = registry.create("papersearchqa", {**LIMITS, "index": url, "index_id": index_id, "search_seconds": 5.0}, TOKENIZER_JSON)
    turns = [call(papers.question(asked).text)]
    assert remote.reply(asked, turns) == papers.reply(asked, turns)
    served.shutdown()
    served.server_close()
    # What was searched before is still known; what was not makes no episode, whichever way it is asked for.
    assert remote.reply(asked, turns) == papers.reply(asked, turns)
    other = [call("never asked before")]
    for ask in (remote.reply, remote.score):
        with pytest.raises(InfrastructureFaultError):
            ask(asked, other)


def test_data_of_another_run_are_refused(tmp_path: Path) -> None:
    assert registry.create("papersearchqa", {"questions": str(SMALL), "questions_id": folder_id(SMALL)}, TOKENIZER_JSON)
    for setting in ({"questions_id": "other"}, {"index": str(small_index()), "index_id": "other"}):
        with pytest.raises(ConfigError, match="set up for other"):
            registry.create("papersearchqa", setting, TOKENIZER_JSON)
    for setting in ({"questions": str(tmp_path)}, {"index": str(tmp_path)}):
        with pytest.raises(FormatError):
            registry.create("papersearchqa", setting, TOKENIZER_JSON)
    for setting in ({"reward": "covers"}, {"top_k": 0}, {"max_corrections": -1}, {"questons": ""}):
        with pytest.raises(ConfigError):
            registry.create("papersearchqa", setting, TOKENIZER_JSON)  # pyright: ignore


def test_question_folder_with_a_leak_is_refused_however_it_came_there(tmp_path: Path) -> None:
    for split in ("train", "held_out", "transfer"):
        (tmp_path / f"{split}.jsonl").write_bytes((SMALL / f"{split}.jsonl").read_bytes())
    row = json.loads((SMALL / "held_out.jsonl").read_text().splitlines()[0])
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps({**row, "id": "qnew", "question": "Another question?"}) + "\n")
    with pytest.raises(ConfigError, match="leaks are left"):
        registry.create("papersearchqa", {"questions": str(tmp_path)}, TOKENIZER_JSON)


def test_unknown_question_is_named(papers: Environment) -> None:
    with pytest.raises(UnknownNameError):
        papers.prompt_ids("q0")


def test_special_ids_are_the_checkpoints(papers: Environment) -> None:
    assert papers.stop_ids == frozenset(write("<|im_end|>"))
    assert ChatRenderer(TOKENIZER_JSON).special.im_end in papers.stop_ids
