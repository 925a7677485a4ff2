"""An episode is told as it was: what was sampled, what the gate dropped, what was given, and what became of its group."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cli.commands.episode import tell
from cli.episodes import episodes_of
from cli.transcript import Fate, Reader, fate_in, kinds_of, parse_id, runs_of
from environments import registry
from stoa.bucket import keys
from stoa.bucket.head import HeadWriter
from stoa.bucket.manifest import Signer
from stoa.bucket.run_document import RunDocument, claim_run, new_run, upload_model_files
from stoa.bucket.steps import STEP_FORMAT, Dropped, Refused, StepManifest, write_step
from stoa.bucket.store import Store
from stoa.chat.render import ChatRenderer
from stoa.config.run import RunConfig
from stoa.contracts.errors import UsageError
from stoa.rollouts.records import Episode, Fingerprint, Group, Turn
from stoa.rollouts.shard import encode_group

POLICY = Path(__file__).parents[3] / "environments" / "search" / "policy"
KEY = keys.group("tale", 3, "mac-1", 12, 4)
OTHER = keys.group("tale", 3, "mac-1", 12, 5)


@pytest.fixture
def document(store: Store) -> RunDocument:
    signer = Signer.from_seed(bytes(range(32)))
    files = upload_model_files(store, "tale", POLICY)
    return claim_run(store, new_run(RunConfig(run="tale"), signer, layout_id="x", model_files=files), signer)


def episode() -> Episode:
    """One search, its result, and an answer: 9 and 4 sampled tokens or so, by the environment's own words."""
    tokenizer = (POLICY / "tokenizer.json").read_bytes()
    environment, renderer = registry.create("search", {}, tokenizer), ChatRenderer(tokenizer)
    question = next(iter(environment.question_ids("train")))
    special = renderer.special
    search = [special.tool_call_start, *renderer.encode('[search(query=" nausea ")]'), special.tool_call_end, special.im_end]
    answer = [*renderer.encode("Answer : nausea"), special.im_end]
    prompt = list(environment.prompt_ids(question))
    reply = list(environment.reply(question, [search]).ids)
    ids = [*prompt, *search, *reply, *answer]
    mask = [0] * len(prompt) + [1] * len(search) + [0] * len(reply) + [1] * len(answer)
    first, second = len(prompt), len(prompt) + len(search) + len(reply)
    turns = (Turn(first, first + len(search), True), Turn(second, len(ids), True))
    logprobs = np.full(len(search) + len(answer), -0.5, np.float32)
    return Episode(
        question, np.array(ids, np.int32), np.array(mask, np.uint8), logprobs, turns, 1.0, {"searched": 1.0, "cover": 1.0}, "answered"
    )


def group(**changes: object) -> Group:
    whole = Group("tale", "mac-1", 12, 4, "train", episode().question_id, 3, "s", 1.0, 0, (episode(),) * 4, Fingerprint("e", "b"))
    return replace(whole, **changes)


def manifest(step: int, parent: str, **changes: object) -> StepManifest:
    bare = StepManifest(STEP_FORMAT, "tale", 1000, step, 3, parent, (), (), (), {}, {}, 0.0, 0.0, 0.0)
    return replace(bare, **changes)


def test_turns_are_cut_where_the_gate_dropped_a_token(store: Store, document: RunDocument) -> None:
    """The second sampled token of the search and the last of the episode."""
    reader = Reader(store, document)
    played = group()
    last = len(episode().logprobs) - 1
    view = reader.view(KEY, played, 1, Fate(5, "trained on", ((), (1, last), (), ())))
    first, second = view.turns
    assert [(s.kind, s.num_tokens) for s in first.stretches[:2]] == [("kept", 1), ("dropped", 1)]
    assert second.stretches[-1].kind == "dropped"
    assert sum(s.num_tokens for turn in view.turns for s in turn.stretches) == view.num_sampled == len(episode().logprobs)
    assert view.num_dropped == 2
    assert first.calls == ("search(query=' nausea ')",)
    assert "tool" in second.before and "nausea" in second.stretches[0].text
    assert view.num_masked == len(episode().ids) - view.num_sampled
    assert view.question.endswith("?") and view.answers


def test_what_nobody_kept_is_not_told_as_nothing(store: Store, document: RunDocument, capsys: pytest.CaptureFixture[str]) -> None:
    view = Reader(store, document).view(KEY, group(), 0, Fate(5, "trained on", None))
    assert view.num_dropped == -1
    tell(view)
    tell(replace(view, num_dropped=2))
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("tokens "))
    assert first.endswith("given (masked); nothing is kept of what the gate dropped")
    assert second.endswith("given (masked); 2 dropped by the gate")


def test_fate_is_read_from_the_steps_and_listed_episodes_lead_to_it(store: Store, document: RunDocument) -> None:
    reader = Reader(store, document)
    assert reader.fate(KEY) == Fate()
    store.create(KEY, encode_group(group()))
    store.create(OTHER, b"garbled")
    writer = HeadWriter(store, "tale", Signer.from_seed(bytes(range(32))), owner="t", interval_seconds=0.0)
    writer.acquire(1000)
    one = write_step(store, manifest(1, "", consumed=(KEY,), gated={KEY: ((3,), (), (), ())}))
    two = write_step(store, manifest(2, one, dropped=(Dropped(OTHER, "all_zero"),), version=4))
    writer.swap(1000, step=2, step_manifest_key=two)
    assert reader.fate(KEY) == Fate(1, "trained on", ((3,), (), (), ()))
    assert reader.fate(OTHER) == Fate(2, "dropped: all zero")
    sampled, rows = episodes_of(store, document, None, 20)
    assert (sampled, [row.id for row in rows]) == (3, [f"v3/mac-1/12/4/{i}" for i in range(4)])
    assert parse_id("tale", rows[2].id) == (KEY, 2)


def test_step_tells_of_a_refused_group_and_of_no_other() -> None:
    step = manifest(1, "", refused=(Refused(KEY, "mac-1", "wrong_reward"),))
    assert fate_in(step, KEY) == Fate(1, "refused: wrong reward")
    assert fate_in(step, OTHER) is None


def test_places_count_sampled_tokens_and_those_beyond_are_passed_over() -> None:
    kinds = kinds_of(np.array([0, 1, 1, 0, 1], np.uint8), (1, 2, 9))
    assert list(kinds) == ["given", "kept", "dropped", "given", "dropped"]
    assert list(runs_of(kinds, 1, 5)) == [("kept", 1, 2), ("dropped", 2, 3), ("given", 3, 4), ("dropped", 4, 5)]


@pytest.mark.parametrize("text", ["", "v3", "3/mac-1/12", "v3/MAC/1/2/3", "v3/mac-1/1/2/3/4", "../../x"])
def test_what_is_no_id_is_wrong_use(text: str) -> None:
    with pytest.raises(UsageError, match="is no episode"):
        parse_id("tale", text)


def test_missing_group_and_missing_episode_are_told_with_what_to_do(store: Store, document: RunDocument) -> None:
    reader = Reader(store, document)
    with pytest.raises(UsageError, match="has no group") as caught:
        reader.group(KEY)
    assert "stoa episode ls tale" in caught.value.hint
    with pytest.raises(UsageError, match="has no episode 4"):
        reader.view(KEY, group(), 4, Fate())
