"""`stoa eval CHECKPOINT` without a run: two processes share the questions, and results of two samples can be compared.

A wired set, too: MLX's real ring on loopback, one rank of which is killed; another command goes on where it ended.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stoa.bucket import keys
from stoa.bucket.store import Store
from stoa.rollouts.shard import decode_group

POLICY = str(Path(__file__).parents[2] / "environments" / "search" / "policy")


def stoa(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", "-m", "cli.main", *arguments], capture_output=True, text=True, timeout=200)


@pytest.mark.loop
@pytest.mark.timeout(240)
def test_checkpoint_is_examined_by_two_processes_and_compared_with_itself(tmp_path: Path) -> None:
    out = tmp_path / "base.json"
    small = ["--questions", "24", "--samples", "2", "--set", "evaluation.questions_a_part=4", "--workers", "2"]
    done = stoa("eval", POLICY, *small, "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    (exam,) = json.loads(done.stdout)
    found = exam["measures"]
    assert (found["num_questions"], found["num_samples"]) == (24, 2)
    for name in ("pass_at_1", "pass_at_2", "cover", "exact_match", "search_rate", "turns_mean", "tokens_mean", "truncated_rate"):
        one = found["estimates"][name]
        assert one["low"] <= one["value"] <= one["high"]
    assert sum(player["num_parts"] for player in exam["players"]) == 6
    assert sum(player["num_questions"] for player in exam["players"]) == 48
    assert all(player["questions_an_hour"] > 0 and player["tokens_per_second"] > 0 for player in exam["players"])
    compared = stoa("eval", "--compare", str(out), str(out), "--json")
    assert compared.returncode == 0, compared.stderr
    same = json.loads(compared.stdout)
    assert (same["num_questions"], same["difference"], same["p_value"]) == (24, 0.0, 1.0)
    refused = stoa("eval", str(tmp_path), "--questions", "4")
    assert refused.returncode == 2
    assert "no folder of that name holds a config.json" in refused.stderr


def second_rank(launcher: int) -> psutil.Process:
    """The process of the second Mac."""
    ranks = (one for one in psutil.Process(launcher).children(recursive=True) if "worker_mac.cluster.rank" in one.cmdline())
    return next(one for one in ranks if one.environ().get("MLX_RANK") == "1" and "python" in one.name())


@pytest.mark.loop
@pytest.mark.timeout(240)
def test_what_a_lost_wired_set_answered_is_kept_and_one_mac_plays_the_rest(store: Store, tmp_path: Path) -> None:
    (tmp_path / "hosts.json").write_text(json.dumps([{"ssh": "127.0.0.1"}, {"ssh": "127.0.0.1"}]))
    (tmp_path / "home").mkdir()
    environment = {
        **os.environ, "HOME": str(tmp_path / "home"), "STOA_STATE": str(tmp_path / "state"),
        "STOA_BUCKET_ENDPOINT": store.settings.endpoint, "STOA_BUCKET_NAME": store.settings.name,
    }  # fmt: skip
    name = f"lost-{os.getpid()}"
    asked = ["eval", POLICY, "--questions", "24", "--samples", "2", "--set", "evaluation.questions_a_part=3", "--name", name]
    line = [sys.executable, "-W", "ignore", "-m", "cli.main", *asked]
    on_a_set = [*line, "--hosts", str(tmp_path / "hosts.json"), "--no-doctor"]
    wired = subprocess.Popen(on_a_set, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not list(store.list(keys.exam_answers_prefix(name))):
        assert wired.poll() is None and time.monotonic() < deadline, wired.communicate()
        time.sleep(0.1)
    os.kill(second_rank(wired.pid).pid, signal.SIGKILL)
    _, told = wired.communicate(timeout=60)
    assert wired.returncode == 1
    assert "error: the wired set is lost: " in told and "the same command goes on with the parts that are not answered" in told
    assert "memory: Mac 1, layer" in told
    kept = {found.key: found.modified_at for found in store.list(keys.exam_answers_prefix(name))}
    assert 0 < len(kept) < 8
    began = time.monotonic()
    done = subprocess.run([*line, "--json"], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 100, "nobody waited until the lost set's claim was void"
    (exam,) = json.loads(done.stdout)
    assert sorted(player["num_parts"] for player in exam["players"]) == sorted([len(kept), 8 - len(kept)])
    answers = {found.key: found.modified_at for found in store.list(keys.exam_answers_prefix(name))}
    assert len(answers) == 8 and answers.items() >= kept.items()
    asked_of = [one.question_id for key in answers for one in decode_group(store.get(key, max_bytes=1 << 24).data).episodes]
    assert len(asked_of) == 48 and len(set(asked_of)) == 24
