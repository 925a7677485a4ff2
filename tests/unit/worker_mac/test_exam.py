"""An examination's result does not depend on who plays which part, and an export of ours is examined by its own codes."""

import json
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from benchmarks.wired_cases import STOCK
from environments import registry
from stoa.bucket import keys
from stoa.bucket.exams import ExamTask, answered, claim, open_exam, read_exam, read_task, write_task
from stoa.bucket.store import Store
from stoa.config.host import MacHost
from stoa.contracts.errors import CheckpointError, WiredError
from stoa.rollouts.records import Episode
from stoa.rollouts.shard import decode_group
from stoa.weights.export import write_mlx_folder
from stoa.weights.layout import layout_of
from tests.unit.chat.conftest import character_tokenizer
from tests.unit.worker_mac.wired import followed
from worker_mac.checkpoint import state_of
from worker_mac.cluster.sitting import spread
from worker_mac.cluster.split import Strength
from worker_mac.exam import Seat, alone

POLICY = Path(__file__).parents[3] / "environments" / "search" / "policy"
WIDE = json.loads((POLICY / "config.json").read_text()) | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["conv", "full_attention"],
}
QUESTIONS = registry.create("search", {}, (POLICY / "tokenizer.json").read_bytes()).question_ids("held_out")[:12]


def task(store: Store, exam: str, host: str, questions_a_part: int, folder: Path = POLICY) -> ExamTask:
    bucket = store.settings.model_dump(mode="json")
    return ExamTask(
        exam, host, str(folder), "float32", bucket, "search", {}, tuple(QUESTIONS), 2, questions_a_part, 3, (1.0, 0, 1.0, 0.0), 600.0
    )


def random_checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """A hub folder with random weights and the policy's tokenizer."""
    folder.mkdir()
    mx.random.seed(3)
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    arrays = dict(tree_flatten(module.Model(module.ModelArgs.from_dict(config)).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((POLICY / name).read_bytes())
    return folder


def episodes_of(store: Store, exam: str) -> dict[tuple[str, int], Episode]:
    found: dict[tuple[str, int], Episode] = {}
    plan = read_exam(store, exam)
    for _, key in sorted(answered(store, plan).items()):
        for episode in decode_group(store.get(key, max_bytes=1 << 24).data).episodes:
            sample = sum(question == episode.question_id for question, _ in found)
            found[episode.question_id, sample] = episode
    return found


def test_result_is_the_same_however_questions_are_dealt_out(store: Store, tmp_path: Path) -> None:
    alone = Seat(task(store, "alone", "mac-a", 12), store, tmp_path)
    assert alone.sit() == 1
    one = Seat(task(store, "shared", "mac-a", 5), store, tmp_path)
    other = Seat(task(store, "shared", "mac-b", 5), store, tmp_path)
    assert one.sit() == 3
    assert other.sit() == 0, "nothing is left, nothing is played twice"
    first, second = episodes_of(store, "alone"), episodes_of(store, "shared")
    assert first.keys() == second.keys()
    assert len(first) == 24
    for place, episode in first.items():
        np.testing.assert_array_equal(episode.ids, second[place].ids)
        np.testing.assert_array_equal(episode.logprobs, second[place].logprobs)
    assert any(not np.array_equal(first[q, 0].ids, first[q, 1].ids) for q in QUESTIONS), "samples of a question differ"
    assert len(list(store.list(keys.exam_claims_prefix("shared")))) == 3


def test_a_wired_set_gives_the_same_bytes_as_one_mac_and_takes_only_what_is_free(store: Store, tmp_path: Path) -> None:
    alone = Seat(task(store, "one", "mac-a", 5), store, tmp_path)
    assert alone.sit() == 3
    with followed(2) as (ranks, link):
        make = partial(spread, ranks, link, [Strength(None, 1.0), Strength(None, 1.0)], "pipeline")
        wired = Seat(task(store, "set", "the-set", 5), store, tmp_path, make=make)
        assert wired.state_id == alone.state_id
        assert claim(store, alone.plan, "mac-a", now=time.time(), expires_seconds=600) is None
        open_exam(store, wired.plan)
        assert claim(store, wired.plan, "mac-b", now=time.time(), expires_seconds=600) == 0
        store.create(keys.exam_answer("set", 0), store.get(keys.exam_answer("one", 0), max_bytes=1 << 24).data)
        assert wired.sit() == 2, "the part that another Mac plays is not played again"
    for part in range(3):
        one, other = (decode_group(store.get(keys.exam_answer(exam, part), max_bytes=1 << 24).data) for exam in ("one", "set"))
        for first, second in zip(one.episodes, other.episodes, strict=True):
            assert (first.question_id, first.turns) == (second.question_id, second.turns)
            np.testing.assert_array_equal(first.ids, second.ids)
            np.testing.assert_array_equal(first.logprobs, second.logprobs)


@pytest.mark.parametrize("family", ["llama", "olmoe"])
def test_another_familys_checkpoint_is_examined_alike_by_one_mac_and_a_set(family: str, store: Store, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / family, STOCK[family] | {"vocab_size": 128})
    (folder / "tokenizer.json").write_text(character_tokenizer(("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")).to_str())
    alone = Seat(task(store, f"{family}-one", "mac-a", 12, folder), store, tmp_path)
    alone.sit()
    with followed(2) as (ranks, link):
        make = partial(spread, ranks, link, [Strength(None, 1.0)] * 2, "pipeline")
        Seat(task(store, f"{family}-set", "the-set", 12, folder), store, tmp_path, make=make).sit()
    first, second = episodes_of(store, f"{family}-one"), episodes_of(store, f"{family}-set")
    assert len(first) == 24
    for place, episode in first.items():
        np.testing.assert_array_equal(episode.ids, second[place].ids)
        np.testing.assert_array_equal(episode.logprobs, second[place].logprobs)


def test_a_share_of_every_layer_gives_the_same_answers_but_for_rounding(store: Store, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "wide", WIDE)
    alone = Seat(task(store, "whole", "mac-a", 12, folder), store, tmp_path)
    alone.sit()
    with followed(2) as (ranks, link):
        make = partial(spread, ranks, link, [Strength(None, 1.0)] * 2, "tensor")
        dealt = Seat(task(store, "dealt", "the-set", 12, folder), store, tmp_path, make=make)
        assert dealt.state_id == alone.state_id
        dealt.sit()
    first, second = episodes_of(store, "whole"), episodes_of(store, "dealt")
    for place, episode in first.items():
        np.testing.assert_array_equal(episode.ids, second[place].ids)
        np.testing.assert_allclose(episode.logprobs, second[place].logprobs, atol=1e-4)


def test_what_each_mac_will_hold_is_told_and_a_set_without_room_takes_nothing(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with followed(2) as (ranks, link):
        small = partial(spread, ranks, link, [Strength(100_000, 1.0)] * 2, "pipeline")
        with pytest.raises(WiredError, match="do not fit these 2 Macs"):
            Seat(task(store, "small", "the-set", 12), store, tmp_path, make=small)
        assert not ranks.bytes_sent
        room = partial(spread, ranks, link, [Strength(10**9, 1.0), Strength(None, 1.0)], "pipeline")
        Seat(task(store, "room", "the-set", 12), store, tmp_path, make=room)
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("memory: ")]
    # By hand: codes with 1/16 more for scales and biases, and raw tensors at 4 bytes. Layer 0: 40,960 codes, 320 raw; layer 1: 110,592
    # and 680; layer 2: 114,688 and 840; the embedding's 16,384 codes stand on both, the last norm's 64 on the second.
    assert told == [
        "memory: Mac 0, layers 0 to 1: weights of 182 kB, of 1.0 GB that may be taken",
        "memory: Mac 1, layer 2: weights of 143 kB",
    ]


@pytest.mark.parametrize(("said", "fraction"), [('memory_fraction = 0.25\nhours = "22:00-06:00"\n', 0.25), (None, 0.9)])
def test_one_mac_alone_heeds_what_its_owner_lets_weights_and_pages_take(
    said: str | None, fraction: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOA_STATE", str(tmp_path))
    if said is not None:
        (tmp_path / "mac").mkdir()
        (tmp_path / "mac" / "mac.toml").write_text(said)
    config = json.loads((POLICY / "config.json").read_text())
    search = registry.create("search", {}, (POLICY / "tokenizer.json").read_bytes())
    means = alone(layout_of(config, "float32"), config, search, tmp_path)
    assert means.player._guest.allowed == MacHost(memory_fraction=fraction)


def test_a_mistral_with_a_window_is_examined_only_where_no_episode_outgrows_it(store: Store, tmp_path: Path) -> None:
    longest = registry.create("search", {}, (POLICY / "tokenizer.json").read_bytes()).limits.max_episode_tokens
    config = STOCK["llama"] | {"model_type": "mistral", "sliding_window": longest}
    short = random_checkpoint(tmp_path / "short", STOCK["llama"])
    (short / "config.json").write_text(json.dumps(config | {"sliding_window": longest - 1}))
    with pytest.raises(CheckpointError, match=rf"sliding_window is {longest - 1}, .* {longest} tokens"):
        Seat(task(store, "short", "mac-a", 12, short), store, tmp_path)
    (short / "config.json").write_text(json.dumps(config))
    Seat(task(store, "long", "mac-a", 12, short), store, tmp_path)


def test_exported_codes_are_taken_as_they_are(tmp_path: Path) -> None:
    config = json.loads((POLICY / "config.json").read_text())
    layout = layout_of(config, "float32")
    state = state_of(POLICY, layout)
    write_mlx_folder(state, POLICY, tmp_path / "export")
    assert state_of(tmp_path / "export", layout).state_id() == state.state_id()
    told = json.loads((tmp_path / "export" / "config.json").read_text())
    (tmp_path / "export" / "config.json").write_text(json.dumps({**told, "quantization": {"bits": 4, "group_size": 64}}))
    with pytest.raises(CheckpointError, match="4 bits"):
        state_of(tmp_path / "export", layout)


def test_task_comes_back_as_written(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "task.json"
    write_task(task(store, "any", "mac-a", 5), path)
    assert read_task(path) == task(store, "any", "mac-a", 5)
