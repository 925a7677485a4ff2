"""Warm starts by real processes on a ring: two ranks make the update of one, lost and hanging ranks, the trainer takes the result."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import Lfm2MoeForCausalLM  # before the trainer prepares this process for a machine without CUDA

from benchmarks.warmstart import write_wide
from cli.main import run as stoa
from cli.say import Exit
from cli.warmstart import Hosts, Processes, ring, run
from stoa.config.load import PROJECT_ROOT
from stoa.config.run import Learning
from stoa.weights.layout import layout_of
from tests.servers import free_ports
from trainer_gpu.export import compare
from trainer_gpu.policy import Policy
from worker_mac.warmstart.ranks import GAVE_UP, Ranks
from worker_mac.warmstart.run import warm_start
from worker_mac.warmstart.settings import Settings

pytestmark = [pytest.mark.loop, pytest.mark.timeout(300)]

POLICY = Path(__file__).parents[2] / "environments/search/policy"


def settings(folder: Path, **changes: object) -> Settings:
    usual = Settings(model=str(POLICY), out=str(folder / "out"), state=str(folder / "state"), num_steps=30, batch_rows=8, save_every=5)
    return replace(usual, **changes)


def trained(asked: Settings) -> dict[str, np.ndarray]:
    return load_file(asked.state_folder / f"step-{asked.num_steps:08d}" / "trained.safetensors")


def test_two_ranks_of_unlike_speed_make_the_update_of_one_and_lose_nothing_with_a_rank(tmp_path: Path) -> None:
    one, asked = settings(tmp_path / "one"), settings(tmp_path / "two", num_ranks=2, shares=(3.0, 1.0))
    warm_start(one, Ranks(), lambda event, facts: None)
    with ring(2) as environments, Processes([_line(asked)] * 2, environments) as processes:
        faults = []
        for event in processes.events():
            if event["event"] == "saved" and event["step"] == 5:
                os.kill(processes.pids[1], signal.SIGKILL)
            faults += [event] if event["event"] == "fault" else []
    assert "lost the others" in str(faults[0]["message"]) and not asked.out_folder.exists()
    outcome = run(asked.to_json(), 2, None, resume=True)
    assert outcome.exit is Exit.DONE and outcome.last_step["num_rows"] == 8 and int(str(outcome.last_step["bytes_summed"])) > 0
    alone, together = trained(one), trained(asked)
    assert max(float(np.abs(alone[name] - together[name]).max()) for name in alone) <= 1e-5
    moved = max(float(np.abs(array).max()) for name, array in alone.items() if name.endswith("lora_b"))
    assert moved > 1e-5


def test_split_matrices_learn_what_one_mac_does_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    usual = settings(tmp_path, model=str(write_wide(tmp_path / "wide")), bits=8, num_steps=4, batch_rows=4, save_every=2)
    one = replace(usual, out=str(tmp_path / "one"), state=str(tmp_path / "one.warmstart"))
    warm_start(one, Ranks(), lambda event, facts: None)
    split = replace(usual, split="tensor", num_ranks=2, grad_checkpoint=True)
    assert run(split.to_json(), 2, None, resume=False).exit is Exit.DONE
    # Their gradients: Adam divides by those of experts that are smaller than their rounding.
    alone, together = (load_file(one_of.state_folder / "step-00000002" / "first.safetensors") for one_of in (one, split))
    assert set(alone) == set(together) and sum("switch_mlp" in name for name in alone) == 12
    largest = max(float(np.abs(array).max()) for array in alone.values())
    assert max(float(np.abs(alone[name] - together[name]).max()) for name in alone) <= 1e-4 * largest
    last = split.state_folder / "step-00000004"
    before = {path.name: path.read_bytes() for path in (*last.iterdir(), split.out_folder / "model.safetensors")}
    shutil.rmtree(last)
    shutil.rmtree(split.out_folder)
    assert run(split.to_json(), 2, None, resume=True).exit is Exit.DONE
    assert {path.name: path.read_bytes() for path in (*last.iterdir(), split.out_folder / "model.safetensors")} == before


def test_ranks_with_other_settings_are_named_before_anything_is_loaded(tmp_path: Path) -> None:
    two = settings(tmp_path, num_ranks=2)
    other = replace(two, learning_rate=0.5)
    with ring(2) as environments, Processes([_line(two), _line(other)], environments) as processes:
        events = list(processes.events())
    assert {event["event"] for event in events} == {"fault"}
    assert all("of rank 1 is not that of rank 0" in str(event["message"]) and event["usage"] for event in events)


def test_a_rank_that_hangs_ends_the_others(tmp_path: Path) -> None:
    asked = settings(tmp_path, num_ranks=2, num_steps=100_000, wait_seconds=8.0, shares=(1.0, 1.0))
    with ring(2) as environments, Processes([_line(asked)] * 2, environments) as processes:
        for event in processes.events():
            if event["event"] == "step":
                break
        os.kill(processes.pids[1], signal.SIGSTOP)
        while not processes.codes:  # the file's limit ends a wait for ever
            time.sleep(0.1)
        os.kill(processes.pids[1], signal.SIGKILL)
        assert processes.codes[0] == GAVE_UP


def test_the_trainer_starts_from_what_was_taught(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "policy"
    command = ["warmstart", str(out), "--model", str(POLICY), "--steps", "2", "--rows", "4", "--learning-rate", "0.01"]
    assert stoa([*command, "--grad-checkpoint", "--json"]) is Exit.DONE
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["memory"]["grad_checkpoint"] and told["last_step"]["step"] == 1 and told["exported"]["folder"] == str(out)
    config = json.loads((out / "config.json").read_text())
    policy = Policy(out, Learning(dtype="float32", num_threads=1), seed=0, layout_id=layout_of(config, "float32").layout_id)
    ours = dict(policy.trainable.model.named_parameters())["embedding.word_embeddings.weight"]
    assert torch.equal(ours, torch.from_numpy(load_file(out / "model.safetensors")["model.embed_tokens.weight"]))
    assert compare(policy.trainable.model, policy.config, out, [[1, 2, 9, 30, 31, 77, 12, 3]]).max_logit_difference < 1e-3
    assert Lfm2MoeForCausalLM.from_pretrained(out).num_parameters() == 284_512
    assert stoa(command) is Exit.WRONG_USE
    assert "not an empty folder" in capsys.readouterr().err


def test_mlx_launch_runs_the_ranks_of_a_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text('[{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}, {"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}]')
    asked = settings(tmp_path, num_ranks=2, num_steps=1)
    outcome = run(asked.to_json(), 2, Hosts(file, 2, sys.executable, str(PROJECT_ROOT)), resume=False, port=free_ports(1)[0])
    assert outcome.exit is Exit.DONE and (asked.out_folder / "model.safetensors").is_file()


def _line(asked: Settings) -> list[str]:
    return [sys.executable, "-m", "worker_mac.warmstart", asked.to_json(), *(["--resume"] if asked.state_folder.exists() else [])]


def test_the_guides_commands_do_what_it_says(tmp_path: Path) -> None:
    guide = (PROJECT_ROOT / "docs/guides" / "warm-start.md").read_text()
    (tmp_path / "environments").symlink_to(PROJECT_ROOT / "environments")
    for line in "\n".join(re.findall(r"```console\n(.*?)```", guide, re.DOTALL)).splitlines():
        program, *words = shlex.split(line)
        subprocess.run([Path(sys.executable).with_name(program), *words], cwd=tmp_path, check=True)
    assert (tmp_path / "taught/model.safetensors").is_file() and (tmp_path / "taught.warmstart/adapters/adapters.safetensors").is_file()
