"""PaperSearchQA in a sweep: corrected, searched and answered; checked again by the trainer's referee; lost in an outage."""

import threading
from collections.abc import Iterator

import pytest

from environments import registry
from environments.base import Environment
from environments.papersearchqa.questions import small_index
from environments.search.retrieval import LocalRetriever
from environments.search.serve import SearchServer
from tests.unit.chat.conftest import SPECIAL, character_tokenizer
from tests.unit.worker_mac.tasks import ScriptedRows, play
from trainer_gpu.referee import Referee
from worker_mac.sampler import seed_of
from worker_mac.sweep import Casting

TOKENIZER = character_tokenizer((*SPECIAL, "<think>", "</think>"))
LIMITS = {"max_turn_tokens": 300, "max_episode_tokens": 6_000, "max_passage_chars": 1200, "top_k": 1}


def create(**settings: object) -> Environment:
    return registry.create("papersearchqa", {**LIMITS, **settings}, TOKENIZER.to_str().encode())  # pyright: ignore


def write(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


class Researcher:
    """Says nonsense, then searches with the question's own words, then answers what it was told to."""

    def __init__(self, environment: Environment) -> None:
        self._opening, self._tool = write("<|im_start|>assistant\n"), write("<|im_start|>tool\n")
        self._scripts: dict[str, list[list[int]]] = {}
        for split in ("train", "held_out"):
            for question_id in environment.question_ids(split):
                question = environment.question(question_id)
                lines = ["Hm.<|im_end|>", f"<|tool_call_start|>[search(query={question.text!r})]<|tool_call_end|><|im_end|>"]
                lines.append(f"<think>Found.</think>Answer: {question.answers[0]}<|im_end|>")
                self._scripts[question.text] = [write(line) for line in lines]

    def next_id(self, ids: list[int]) -> int:
        text = TOKENIZER.decode(ids, skip_special_tokens=False)
        asked = text.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        said = text.rpartition("<|im_start|>assistant\n")[2]
        return self._scripts[asked][text.count("<|im_start|>tool\n")][len(write(said))]


def test_episode_is_corrected_searches_answers_and_is_the_same_to_the_referee() -> None:
    environment = create()
    questions = [q for q in environment.question_ids("train") if environment.question(q).answers[0].isalnum()][:2]
    castings = [Casting(group, question, seed_of("papers", group, 0)) for group, question in enumerate(questions)]
    played, found = play(ScriptedRows(Researcher(environment).next_id), environment, castings)
    assert (played.num_episodes, played.num_lost, played.reward_sum) == (2, 0, 2.0)
    referee = Referee(create())
    for group, question in enumerate(questions):
        (episode,) = found[group]
        assert (episode.stop_reason, len(episode.turns)) == ("answered", 3)
        assert (episode.reward_parts["num_malformed"], episode.reward_parts["num_calls"]) == (1.0, 1.0)
        sampled = [tuple(episode.ids[turn.start : turn.end].tolist()) for turn in episode.turns]
        again = referee.rescore(question, sampled)
        assert (again.reward, again.parts, again.done) == (episode.reward, episode.reward_parts, True)
        ids = list(referee.prompt_ids_of(question))
        for turn, reply in zip(sampled, again.appended, strict=True):
            ids += [*turn, *reply]
        assert episode.ids.tolist() == ids


@pytest.fixture
def server() -> Iterator[SearchServer]:
    with SearchServer(("127.0.0.1", 0), LocalRetriever(small_index())) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def test_outage_of_the_search_server_loses_episodes_and_scores_none_as_wrong(server: SearchServer) -> None:
    environment = create(index=f"http://127.0.0.1:{server.server_address[1]}", search_seconds=5.0)
    question = environment.question_ids("train")[0]
    server.shutdown()
    server.server_close()
    played, found = play(ScriptedRows(Researcher(environment).next_id), environment, [Casting(0, question, 1)])
    assert (played.num_episodes, played.num_lost, played.reward_sum) == (1, 1, 0.0)
    assert found == {0: []}
