"""The measuring of a Mac: what the knee is, what is kept for the worker, and that a worker beside it is refused."""

import json
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.bench import kernel_lines, read, sentences
from stoa.config.host import MacHost
from stoa.config.load import PROJECT_ROOT
from stoa.config.run import Rollout
from stoa.contracts.errors import UsageError
from stoa.weights.layout import layout_of
from tests.unit.worker_mac.policies import TINY
from worker_mac.bench import Chatter, Measured, Patience, bench, keep, knee, measure, random_weights
from worker_mac.bench_update import ONE_IN, Update, measure_update
from worker_mac.forced import Forced
from worker_mac.guest import Guest
from worker_mac.identity import Identity
from worker_mac.memory import plan_memory
from worker_mac.model import Model
from worker_mac.model_config import read_model_config
from worker_mac.pace import MOST_TOKENS
from worker_mac.player import Player
from worker_mac.versions import Served
from worker_mac.watts import metered, read_macmon, read_powermetrics
from worker_mac.width import read_knee


@pytest.mark.parametrize(
    ("rates", "groups"),
    [
        ({1: 10.0}, 1),
        ({1: 10.0, 2: 19.0, 4: 30.0, 8: 33.0}, 4),  # 30 of 33 is 0.91
        ({1: 10.0, 2: 19.0, 4: 29.0, 8: 33.0}, 8),
        ({1: 30.0, 2: 33.0, 4: 20.0}, 1),  # a Mac that slows down when it is wide
        ({4: 5.0, 2: 5.0, 1: 5.0}, 1),
    ],
)
def test_the_knee_is_the_narrowest_width_with_nine_tenths_of_the_best_rate(rates: dict[int, float], groups: int) -> None:
    assert knee(rates) == groups


@given(st.dictionaries(st.integers(1, 64), st.floats(0.1, 1e5), min_size=1), st.floats(0.5, 1.0))
def test_the_knee_was_measured_and_nothing_narrower_is_as_good(rates: dict[int, float], enough: float) -> None:
    found = knee(rates, enough)
    assert rates[found] >= enough * max(rates.values())
    assert all(rate < enough * max(rates.values()) for width, rate in rates.items() if width < found)


def test_random_weights_give_logits_that_are_numbers() -> None:
    rows = Forced(Model(read_model_config(TINY), random_weights(layout_of(TINY, "bfloat16")).arrays), 2, 64)
    logits = rows.feed([np.arange(20, dtype=np.int32), np.arange(7, dtype=np.int32)])
    assert np.isfinite(logits).all() and logits.std() > 0.01


def test_what_is_kept_is_what_the_worker_reads(tmp_path: Path) -> None:
    measured = Measured("abc", 8, {1: 10.123, 2: 20.0}, 2, 0.8, 1000, "f", "cpu", Update(10, 9, 0.1, 0.2, 0.3))
    assert json.loads(keep(tmp_path, measured, now=5.0).read_text()) == {
        "format": 1, "model": "abc", "knee_groups": 2, "tokens_per_second": {"1": 10.12, "2": 20.0}, "measured_at": 5.0,
    }  # fmt: skip
    assert (read_knee(tmp_path, "abc"), read_knee(tmp_path, "another model")) == (2, 0)


def test_all_widths_are_measured_and_the_model_is_named(tmp_path: Path) -> None:
    measured = bench(TINY, "float32", [1, 2], 4, folder=tmp_path, allowed=MacHost(), meter=lambda: 30.0)
    assert measured.watts == 30.0
    assert set(measured.tokens_per_second) == {1, 2}
    assert measured.model == layout_of(TINY, "float32").layout_id
    assert measured.knee_groups in (1, 2) and measured.peak_bytes > 0
    assert measured.step_seconds == pytest.approx(4 * measured.knee_groups / measured.tokens_per_second[measured.knee_groups])


class Narrow(Player):
    """A Mac that holds one group."""

    def _memory_bytes(self) -> int | None:
        play = self._play_of(self._environment.question_ids("train")[0])
        return plan_memory(self._model, play, most_groups=1, memory_bytes=None, step_tokens=MOST_TOKENS).total_bytes


def narrow(folder: Path) -> tuple[Narrow, Served]:
    """It, and weights for it."""
    layout, config = layout_of(TINY, "float32"), read_model_config(TINY)
    live = random_weights(layout)
    rollout, guest = Rollout(groups=4, group_size=4), Guest(MacHost())
    player = Narrow(Chatter(config.vocab_size), rollout, layout, config, guest, folder=folder, state_folder=folder)
    return player, Served(0, "bench", Model(config, live.arrays), live)


def test_a_width_that_memory_does_not_hold_is_told(tmp_path: Path) -> None:
    player, served = narrow(tmp_path)
    assert measure(player, served, 1, 4)[0] > 0
    with pytest.raises(UsageError, match="4 groups do not fit"):
        measure(player, served, 4, 4)
    # Also where it took longer than prompts may.
    with pytest.raises(UsageError, match="4 groups do not fit"):
        measure(player, served, 4, 4, Patience(prompt_seconds=0.0))
    with pytest.raises(UsageError, match="1 groups have not read their prompts"):
        measure(player, served, 1, 4, Patience(prompt_seconds=0.0))
    mx.set_memory_limit(1 << 40)


def test_what_was_measured_before_a_width_that_cannot_be_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measured(widths: list[int], patience: Patience) -> Measured:
        return bench(TINY, "float32", widths, 4, folder=tmp_path, allowed=MacHost(), meter=lambda: None, patience=patience)

    with pytest.raises(UsageError, match="1 groups have not read their prompts after 0 s"):
        measured([1], Patience(prompt_seconds=0.0))
    found = measured([1, 2], Patience(most_seconds=0.0))
    assert set(found.tokens_per_second) == {1} and found.knee_groups == 1
    assert "2 groups  not measured: it takes too long here" in capsys.readouterr().err


def stoa(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "cli.main", *arguments], capture_output=True, text=True, timeout=55, cwd=PROJECT_ROOT)


def test_the_command_measures_the_demos_model_and_keeps_the_knee(tmp_path: Path) -> None:
    done = stoa("bench", "--state", str(tmp_path), "--groups", "2", "--json")
    assert done.returncode == 0, done.stderr
    rates = read(done.stdout)
    assert set(rates.tokens_per_second) == {1, 2} and rates.group_size == 8
    kept = json.loads((tmp_path / "knee.json").read_text())
    assert kept["knee_groups"] == rates.knee_groups == read_knee(tmp_path, kept["model"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["host", "knee.json", "lock"]
    assert rates.update["num_changed"] > 0 and rates.line is None
    said = list(sentences(rates))
    assert any(line.startswith("knee") for line in said)
    assert "line        not measured: name the configuration of a run, or join first" in said


def test_an_update_changes_about_one_code_in_a_hundred_by_one_step() -> None:
    state = random_weights(layout_of(TINY, "bfloat16")).state
    before = {spec.name: state.arrays[spec.name].view(np.uint8).astype(np.int16) for spec in state.layout.quantised}
    found = measure_update(state)
    moved = np.concatenate([(state.arrays[name].view(np.uint8) - old).reshape(-1) for name, old in before.items()])
    assert np.count_nonzero(moved) == found.num_changed and set(np.unique(moved)) == {-1, 0, 1}
    # drawn with repetition: 1 - exp(-1 / 100) of all codes
    assert found.num_changed / len(moved) == pytest.approx(1 / ONE_IN, rel=0.05)
    assert 0 < found.num_bytes < 2 * found.num_changed
    assert min(found.encode_seconds, found.apply_seconds, found.rescan_seconds) > 0


def test_what_a_person_reads_of_line_power_and_run() -> None:
    update = {"num_changed": 1000, "num_bytes": 2_000_000, "encode_seconds": 0.5, "apply_seconds": 0.25, "rescan_seconds": 1.0}
    tree = {
        "tokens_per_second": {"1": 100.0, "2": 200.0}, "knee_groups": 2, "group_size": 8, "step_seconds": 0.08, "peak_bytes": 5_000_000_000,
        "device": "gpu", "update": update, "watts": 50.0,
    }  # fmt: skip
    rates = read(json.dumps(tree), line=(1_000_000.0, None), run_tokens_per_second=400.0)
    said = {line[:12].strip(): line[12:] for line in sentences(rates)}
    assert said["knee"].startswith("2 groups of 8:")
    alone = read(json.dumps({**tree, "knee_groups": 1}), line=None, run_tokens_per_second=0.0)
    assert next(iter(sentences(alone))).startswith("knee        1 group of 8:")
    assert said["power"] == "50 W at the knee: 4.0 tokens a joule"
    assert said["line"] == "down 1.0 MB/s, up not measured: this key writes nothing without a ticket; such an update comes in 2.0 s"
    # 200 tokens/s * 3600 s of 8 episodes of 1,000 tokens; the run has 400 tokens/s
    assert said["it adds"].startswith("about 90 groups an hour") and said["it adds"].endswith("; 50% of what the run's Macs sample now")
    assert json.loads(rates.json)["down_bytes_per_second"] == 1_000_000.0
    silent = read(json.dumps({**tree, "watts": None}), line=(1_000_000.0, 500_000.0))
    assert any(line.startswith("power       not told") for line in sentences(silent))
    assert any("up 500.0 kB/s; such" in line for line in sentences(silent))


def test_watts_are_read_where_a_tool_tells_them() -> None:
    assert read_macmon('{"all_power":8.5,"sys_power":21.25}\n') == 21.25
    assert read_macmon('{"all_power":8.5,"sys_power":0.0}') == 8.5, "some Macs tell nothing of the whole"
    assert [read_macmon(text) for text in ("", "[1]", "{}", '{"sys_power":"x"}', "error: no such device")] == [None] * 5
    assert read_powermetrics("CPU Power: 1200 mW\nCombined Power (CPU + GPU + ANE): 34567 mW\n") == pytest.approx(34.567)
    assert read_powermetrics("powermetrics must be invoked as the superuser") is None


def test_a_meter_that_tells_nothing_is_asked_once_and_others_give_their_median() -> None:
    asked, given = list[int](), iter([10.0, 50.0, 20.0])

    def silent() -> float | None:
        asked.append(1)
        return None

    with metered(silent) as draw:
        time.sleep(0.05)
    assert (draw.watts, len(asked)) == (None, 1)
    with metered(lambda: next(given, None)) as draw:
        while len(draw.readings) < 3:
            time.sleep(0.01)
    assert draw.watts == 20.0


def test_beside_a_worker_nothing_is_measured(tmp_path: Path) -> None:
    identity = Identity(tmp_path)
    done = stoa("bench", "--state", str(tmp_path), "--groups", "1")
    identity.close()
    assert done.returncode == 1
    assert "is a worker that uses this state folder" in done.stderr


def test_a_width_that_cannot_be_is_wrong_use(tmp_path: Path) -> None:
    done = stoa("bench", "--state", str(tmp_path), "--groups", "65")
    assert (done.returncode, "from 1 to 64" in done.stderr) == (2, True)


def test_kernels_are_told_as_measured_only_where_they_were(tmp_path: Path) -> None:
    done = stoa("bench", "kernels", "--state", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["measured"] == (sys.platform == "darwin")
    row = {"kernel": "experts", "kernel_seconds": 0.04, "plain_seconds": 0.0695, "roofline_seconds": 0.0382, "stock_roofline_seconds": None}
    verdicts = [{"kernel": "experts", "reason": ""}, {"kernel": "head", "reason": "logprobs differ by 0.3"}]
    lines = list(kernel_lines(json.dumps({"chip": "Apple M4 Pro", "measured": True, "rows": [row], "verdicts": verdicts})))
    assert lines[0] == "Apple M4 Pro: measured"
    assert lines[3].split() == ["experts", "40.00", "69.50", "38.20", "-"]
    assert lines[4:] == ["head is not used: logprobs differ by 0.3"]
    text = list(kernel_lines(json.dumps({"chip": "", "measured": False, "rows": [], "verdicts": verdicts})))
    assert text[0].startswith("no Apple chip: nothing measured") and len(text) == 3
