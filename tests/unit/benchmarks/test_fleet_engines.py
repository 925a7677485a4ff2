"""The engines that pretend are honest: their groups are admitted, their deltas lead from version to version."""

import time
from pathlib import Path

from benchmarks.fleet_mac import FakeMac
from benchmarks.fleet_plant import run_config
from benchmarks.fleet_play import Play, make_model_folder
from benchmarks.fleet_policy import FakeTrainer
from cli.launch import check
from environments import registry
from stoa.bucket import keys
from stoa.bucket.manifest import Signer
from stoa.bucket.run_document import claim_run, new_run, upload_model_files
from stoa.bucket.store import Store
from stoa.contracts.fleet_messages import SweepRequest
from stoa.contracts.messages import AcquireRequest, PublishRequest, StepRequest
from stoa.learning.ledger import GrantRecord
from tests.unit.trainer_gpu.runs import Reports, await_version
from trainer_gpu.grant_book import GrantBook
from trainer_gpu.run_handle import RunHandle


def test_a_pretended_mac_and_trainer_do_a_step_together(store: Store, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    config = run_config(folder, {"learning": {"groups_per_step": 2}}).model_copy(update={"bucket": store.settings})
    signer, files = Signer.generate(), upload_model_files(store, config.run, folder)
    document = claim_run(store, new_run(config, signer, layout_id=check(config).layout_id, model_files=files), signer)
    environment = registry.create("search", config.environment.settings, (folder / "tokenizer.json").read_bytes())
    handle = RunHandle(store, document, signer, environment, folder, "box")
    pace = tmp_path / "pace"
    pace.write_text("0.2\n")
    progress = Reports()
    trainer = FakeTrainer(handle, pace=pace)
    token = trainer.acquire(AcquireRequest(config.run, 1), 1, progress).token

    play = Play(sweep_seconds=0.8, jitter=0.0, first_group=0.5)
    mac = FakeMac(store, document, environment, play=play, host="mac-1", folder=tmp_path / "mac", model_folder=folder)
    questions = tuple(environment.question_ids("train")[:4])
    GrantBook(store, config.run).write(GrantRecord("mac-1", 0, 0, questions, 0.0, 0))
    started = time.monotonic()
    played = mac.sweep(SweepRequest(config.run, "mac-1", 0, "train", questions, config.rollout.group_size), progress)
    assert time.monotonic() - started >= 0.8
    assert (played.status, played.num_groups, played.num_episodes, played.version) == ("done", 4, 16, 0)
    sent = (tmp_path / "mac" / "acknowledged").read_text().split()
    assert sorted(sent) == [keys.group(config.run, 0, "mac-1", 0, index) for index in range(4)]

    started = time.monotonic()
    stepped = trainer.train_step(StepRequest(config.run, token, 1), progress)
    assert (stepped.status, stepped.num_groups) == ("done", 2)
    assert time.monotonic() - started >= 0.2
    trainer.publish(PublishRequest(config.run, token, 1, anchor=False, checkpoint=True), progress)
    await_version(handle, 1)
    again = mac.sweep(SweepRequest(config.run, "mac-1", 1, "train", questions, config.rollout.group_size), progress)
    assert (again.status, again.version) == ("done", 1)
    mac.close()
    trainer.close()
