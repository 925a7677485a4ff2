"""What the gate is worth under strong staleness: `python -m benchmarks.gate_study [--json] [--figure FILE]`.

The demo task, int8 rollouts by the Mac's own decoder, Megatron in fp32, and weights that are exactly 8 versions old when
they sample (fewer only in the first 8). Arms differ in the gate alone; seeds differ in questions and sampling. All in one
process, one thread, so staleness is exact and a run can be repeated. Learning rates: a violent one, and a moderate one.
"""

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.sweeps import POLICY, Player, demo_layout, first_state, move_state
from stoa.config.run import Gate, Learning
from stoa.learning.gate import GateMode
from stoa.learning.replay import flatness
from stoa.rollouts.records import Group
from stoa.weights.state import WeightState
from trainer_gpu.policy import Policy
from trainer_gpu.publish import host_tensors

STALENESS = 8
NUM_VERSIONS = 28
GROUPS_PER_STEP, STEPS_PER_VERSION, GROUP_SIZE = 8, 4, 8
MAX_SWEEPS = 16
"""Sweeps of 8 groups that a version looks at most for its 32 usable groups; a collapsed policy gives none."""
EVAL_QUESTIONS, EVAL_SAMPLES, EVAL_EVERY = 128, 2, 4
HYSTERESIS = 0.02
RATES = (2e-3, 1e-3)
ARMS: tuple[GateMode, ...] = ("off", "tv", "ppo_clip")
# Two-sided 95 % quantiles of Student's t by degrees of freedom.
T_QUANTILES = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True, slots=True)
class Point:
    """One version of one run. Rates are of its steps; pass@1 is held out, of the newest weights, None if not measured."""

    version: int
    pass_at_1: float | None
    reward_mean: float
    mismatch_mean: float
    gate_drop_rate: float
    ess_fraction: float
    entropy: float
    malformed_rate: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One run. `ended`: the version after which there was no signal left, if so."""

    learning_rate: float
    gate: GateMode
    seed: int
    points: tuple[Point, ...]
    ended: int | None
    metrics: tuple[dict[str, float], ...]

    @property
    def final(self) -> float:
        """Held-out pass@1 at the end."""
        return next(point.pass_at_1 for point in reversed(self.points) if point.pass_at_1 is not None)

    @property
    def lowest_after_start(self) -> float:
        """The worst held-out pass@1 on the way."""
        return min(point.pass_at_1 for point in self.points if point.pass_at_1 is not None)


def simulate(learning: Learning, *, seed: int, staleness: int = STALENESS, num_versions: int = NUM_VERSIONS) -> Trial:
    """Train from the base policy; at version v groups are played with the weights of version max(0, v - staleness)."""
    policy = Policy(POLICY, learning, seed=seed, layout_id=demo_layout().layout_id)
    state = first_state(policy.layout, host_tensors(policy))
    player = Player(state)
    asker = _Asker(player, seed)
    past = [state.copy()]
    points = [Point(0, asker.examine(state, 0), 0.0, 0.0, 0.0, 1.0, 0.0, 0.0)]
    metrics: list[dict[str, float]] = []
    for version in range(num_versions):
        groups = asker.gather(past[max(0, version - staleness)], max(0, version - staleness))
        if not groups:
            points.append(Point(num_versions, asker.examine(state, num_versions), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
            return Trial(learning.learning_rate, learning.gate.mode, seed, tuple(points), version, tuple(metrics))
        steps: list[dict[str, float]] = []
        for step in range(STEPS_PER_VERSION):
            part = groups[step * GROUPS_PER_STEP : (step + 1) * GROUPS_PER_STEP]
            done = policy.train(
                part,
                version=version,
                step=version * STEPS_PER_VERSION + step + 1,
                planned_sequences=GROUPS_PER_STEP * GROUP_SIZE,
                on_row=lambda row: None,
            )
            steps.append(done.metrics)
        metrics += steps
        move_state(state, host_tensors(policy), HYSTERESIS)
        past.append(state.copy())
        due = (version + 1) % EVAL_EVERY == 0 or version + 1 == num_versions
        points.append(_point(version + 1, asker.examine(state, version + 1) if due else None, steps))
    return Trial(learning.learning_rate, learning.gate.mode, seed, tuple(points), None, tuple(metrics))


class _Asker:
    """Questions in one seeded order, and examinations."""

    def __init__(self, player: Player, seed: int) -> None:
        self._player, self._seed = player, seed
        self._questions = list(player.environment.question_ids("train"))
        random.Random(seed).shuffle(self._questions)
        self._held_out = list(player.environment.question_ids("held_out"))[:EVAL_QUESTIONS]
        self._num_sweeps = 0

    def gather(self, state: WeightState, version: int) -> list[Group]:
        """The usable groups of one version; none if there are too few in MAX_SWEEPS."""
        wanted = GROUPS_PER_STEP * STEPS_PER_VERSION
        usable: list[Group] = []
        for _ in range(MAX_SWEEPS):
            first = self._num_sweeps * 8
            asked = [self._questions[(first + i) % len(self._questions)] for i in range(8)]
            played = self._player.play(state, asked, group_size=GROUP_SIZE, version=version, sweep=self._num_sweeps, seed=self._seed)
            usable += [group for group in played if not flatness(group)]
            self._num_sweeps += 1
            if len(usable) >= wanted:
                return usable[:wanted]
        return []

    def examine(self, state: WeightState, version: int) -> float:
        """Held-out pass@1 of these weights; the same questions and random numbers for every arm of a seed."""
        groups = self._player.play(state, self._held_out, group_size=EVAL_SAMPLES, version=version, sweep=10**6, seed=self._seed)
        return statistics.fmean(episode.reward for group in groups for episode in group.episodes)


def _point(version: int, pass_at_1: float | None, steps: Sequence[dict[str, float]]) -> Point:
    names = ("reward_mean", "mismatch_mean", "gate_drop_rate", "ess_fraction", "entropy", "malformed_rate")
    return Point(version, pass_at_1, *(statistics.fmean(step[name] for step in steps) for name in names))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's 95 % interval of the mean over seeds."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, mean
    half = T_QUANTILES[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def summarise(trials: Sequence[Trial]) -> list[dict[str, object]]:
    """One row an arm: final and worst pass@1 over seeds with intervals, and each paired difference from `off`."""
    rows: list[dict[str, object]] = []
    for rate, gate in dict.fromkeys((trial.learning_rate, trial.gate) for trial in trials):
        own = {trial.seed: trial for trial in trials if (trial.learning_rate, trial.gate) == (rate, gate)}
        base = {trial.seed: trial for trial in trials if (trial.learning_rate, trial.gate) == (rate, "off")}
        finals = [trial.final for trial in own.values()]
        paired = [trial.final - base[seed].final for seed, trial in own.items() if seed in base and gate != "off"]
        rows.append(
            {
                "learning_rate": rate,
                "gate": gate,
                "num_seeds": len(own),
                "final_pass_at_1": [round(value, 4) for value in finals],
                "mean": round(statistics.fmean(finals), 4),
                "interval_95": [round(value, 4) for value in interval(finals)],
                "minus_off": [round(value, 4) for value in paired],
                "minus_off_interval_95": [round(value, 4) for value in interval(paired)] if paired else None,
                "worst_pass_at_1": [round(trial.lowest_after_start, 4) for trial in own.values()],
                "num_without_signal": sum(trial.ended is not None for trial in own.values()),
                "ended_at_version": [trial.ended for trial in own.values()],
                "drop_rate_mean": round(statistics.fmean(p.gate_drop_rate for t in own.values() for p in t.points[1:]), 4),
                "mismatch_mean": round(statistics.fmean(p.mismatch_mean for t in own.values() for p in t.points[1:]), 4),
            }
        )
    return rows


def draw(trials: Sequence[Trial], path: Path) -> None:
    """Held-out pass@1 by version: thin lines are seeds, thick ones their mean, bands its 95 % interval.

    A cross: no signal was left, and the run ended there.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rates = list(dict.fromkeys(trial.learning_rate for trial in trials))
    figure, axes = plt.subplots(1, len(rates), figsize=(5.2 * len(rates), 3.8), sharey=True, squeeze=False)
    names = {"off": "no gate", "tv": "DPPO, TV 0.2", "ppo_clip": "PPO clip 0.2"}
    colours = {"off": "#c0392b", "tv": "#1f6feb", "ppo_clip": "#d98e04"}
    for axis, rate in zip(axes[0], rates, strict=True):
        for gate in dict.fromkeys(trial.gate for trial in trials):
            own = [trial for trial in trials if (trial.learning_rate, trial.gate) == (rate, gate)]
            curves = [{p.version: p.pass_at_1 for p in trial.points if p.pass_at_1 is not None} for trial in own]
            versions = sorted(set.intersection(*(set(curve) for curve in curves)))
            for trial, curve in zip(own, curves, strict=True):
                if trial.ended is not None:
                    axis.plot([trial.ended], [trial.final], "x", color=colours[gate], markersize=5)
                axis.plot(sorted(curve), [curve[v] for v in sorted(curve)], color=colours[gate], alpha=0.25, linewidth=0.8)
            means = [statistics.fmean(curve[v] for curve in curves) for v in versions]
            low, high = zip(*(interval([curve[v] for curve in curves]) for v in versions), strict=True)
            axis.plot(versions, means, color=colours[gate], linewidth=2, label=f"{names[gate]} ({len(own)} seeds)")
            axis.fill_between(versions, low, high, color=colours[gate], alpha=0.12, linewidth=0)
        axis.set(title=f"learning rate {rate:g}, {STALENESS} versions old", xlabel="version", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("held-out pass@1")
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize=8, loc="lower center", ncol=3, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def study(rates: Sequence[float], arms: Sequence[GateMode], num_seeds: int, num_versions: int, cpu_budget_seconds: float) -> list[Trial]:
    """All arms of a seed before the next seed, so that a budget that runs out leaves whole seeds."""
    trials: list[Trial] = []
    for rate in rates:
        for seed in range(num_seeds):
            began = time.process_time()
            for gate in arms:
                learning = Learning(learning_rate=rate, gate=Gate(mode=gate), groups_per_step=GROUPS_PER_STEP, max_staleness_hard=STALENESS)
                trial = simulate(learning, seed=seed, num_versions=num_versions)
                trials.append(trial)
                print(f"lr {rate:g} seed {seed} {gate:9} pass@1 {trial.points[0].pass_at_1:.3f} -> {trial.final:.3f}", file=sys.stderr)
            if time.process_time() + (time.process_time() - began) > cpu_budget_seconds:
                print(f"the budget of {cpu_budget_seconds:.0f} CPU seconds ends the study", file=sys.stderr)
                return trials
    return trials


def main() -> None:
    """Run the study; print its rows and write its figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--figure", type=Path, help="PNG to write")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--versions", type=int, default=NUM_VERSIONS)
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--cpu-seconds", type=float, default=900.0, help="no new seed is begun beyond this")
    asked = parser.parse_args()
    if not 1 <= asked.seeds <= max(T_QUANTILES) + 1 or asked.versions < 1:
        parser.error(f"--seeds is from 1 to {max(T_QUANTILES) + 1}, --versions from 1 on")
    trials = study(asked.rates, ARMS, asked.seeds, asked.versions, asked.cpu_seconds)
    rows = summarise(trials)
    if asked.figure:
        draw(trials, asked.figure)
    if asked.json:
        conditions = {"staleness": STALENESS, "versions": asked.versions, "steps_per_version": STEPS_PER_VERSION}
        runs = [{**asdict(trial), "metrics": None} for trial in trials]
        print(json.dumps({"conditions": conditions, "rows": rows, "cpu_seconds": round(time.process_time()), "runs": runs}))
        return
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
