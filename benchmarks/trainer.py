"""One optimizer step of the trainer beside plain transformers with padding: `python -m benchmarks.trainer --json`.

Both take the same episodes of real sweeps, the same DPPO loss, AdamW, clipping, fp32 and one thread in one process; the
baseline is transformers' own Lfm2MoeForCausalLM on one right-padded batch, as most trainers feed it. Steps alternate and
are timed in CPU seconds of the process, so that a busy machine does not decide. Then the memory of the vocabulary head.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Lfm2MoeForCausalLM

from benchmarks.sweeps import POLICY, Player, demo_layout, first_state
from stoa.config.run import Gate, Learning
from stoa.learning.advantages import group_advantages
from stoa.rollouts.records import Group
from trainer_gpu.head import token_logprobs
from trainer_gpu.loss import dppo_loss
from trainer_gpu.policy import Policy
from trainer_gpu.publish import host_tensors

GROUP_SIZE = 8
STEP_GROUPS = (8, 16, 32)
"""Groups of a step; the last, the recipe of a full-size run, gives the headline. At 8 the optimizer's own time shows."""
NUM_ROUNDS = 9
LEAST_PADDING_RATIO = 1.8

# V vocabulary, T tokens, D hidden of the memory measurement.
HEAD_V, HEAD_T, HEAD_D = 128_000, 8_192, 64


@dataclass(frozen=True, slots=True)
class Trial:
    """Both trainers on the same episodes; seconds are medians of one step, without the first."""

    num_groups: int
    num_tokens: int
    padding_ratio: float
    packed_seconds: float
    padded_hf_seconds: float
    packed_wall_seconds: float
    speedup: float
    largest_weight_difference: float


@dataclass(frozen=True, slots=True)
class Padded:
    """The episodes of a step as one right-padded batch; S is the longest. `log_mu` and `advantages` are 0 off `mask`."""

    ids: torch.Tensor  # int64 [B, S]
    attended: torch.Tensor  # int64 [B, S]
    mask: torch.Tensor  # bool [B, S], sampled tokens
    log_mu: torch.Tensor
    advantages: torch.Tensor


def pad(groups: Sequence[Group]) -> Padded:
    """All episodes of `groups` on the right."""
    pairs = [(e, a) for group in groups for e, a in zip(group.episodes, group_advantages(group.rewards), strict=True)]
    shape = (len(pairs), max(len(episode.ids) for episode, _ in pairs))
    batch = Padded(
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.bool),
        torch.zeros(shape),
        torch.zeros(shape),
    )
    for row, (episode, advantage) in enumerate(pairs):
        size, mask = len(episode.ids), torch.from_numpy(episode.mask.astype(bool))
        batch.ids[row, :size] = torch.from_numpy(episode.ids.astype("int64"))
        batch.attended[row, :size] = 1
        batch.mask[row, :size] = mask
        batch.log_mu[row, :size][mask] = torch.from_numpy(episode.logprobs)
        batch.advantages[row, :size][mask] = float(advantage)
    return batch


class PlainTrainer:
    """Transformers and torch's AdamW, nothing else."""

    def __init__(self, learning: Learning) -> None:
        self.model = Lfm2MoeForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
        self._learning = learning
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=learning.learning_rate,
            betas=(learning.beta1, learning.beta2),
            eps=learning.epsilon,
            weight_decay=learning.weight_decay,
        )

    def step(self, batch: Padded, denominator: float) -> None:
        """One optimizer step."""
        self._optimizer.zero_grad()
        logits = self.model(input_ids=batch.ids, attention_mask=batch.attended).logits[:, :-1]
        log_pi = logits.log_softmax(-1).gather(2, batch.ids[:, 1:, None])[..., 0]
        where = batch.mask[:, 1:]
        loss = dppo_loss(
            log_pi[where], batch.log_mu[:, 1:][where], batch.advantages[:, 1:][where], denominator=denominator, gate=self._learning.gate
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._learning.grad_clip)
        self._optimizer.step()


def record(policy: Policy, num_groups: int) -> list[Group]:
    """Groups of real sweeps of the demo policy, at least as uneven as asked for: the sweeps that pad worst come first."""
    state = first_state(policy.layout, host_tensors(policy))
    player = Player(state)
    questions = list(player.environment.question_ids("train"))
    sweeps = [
        player.play(state, questions[sweep * 8 : sweep * 8 + 8], group_size=GROUP_SIZE, version=0, sweep=sweep, seed=1)
        for sweep in range(2 * num_groups // 8)
    ]
    sweeps.sort(key=lambda groups: -_padding_ratio(groups))
    return [group for groups in sweeps for group in groups][:num_groups]


def _padding_ratio(groups: Sequence[Group]) -> float:
    lengths = [len(episode.ids) for group in groups for episode in group.episodes]
    return max(lengths) * len(lengths) / sum(lengths)


def trial(policy: Policy, groups: Sequence[Group], learning: Learning, num_rounds: int) -> Trial:
    """Alternate steps of both, from the same weights on."""
    policy.load_base()
    plain = PlainTrainer(learning)
    batch = pad(groups)
    num_tokens = int(batch.attended.sum())
    denominator = float(len(groups) * GROUP_SIZE * learning.tokens_per_sequence)

    def packed() -> None:
        policy.train(groups, version=0, step=1, planned_sequences=len(groups) * GROUP_SIZE, on_row=lambda row: None)

    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    largest = 0.0
    for number in range(num_rounds + 1):
        ours.append(_timed(packed))
        theirs.append(_timed(lambda: plain.step(batch, denominator)))
        if number == 0:
            largest = _weight_difference(policy, plain)
    seconds, hf_seconds = (statistics.median(cpu for cpu, _ in times[1:]) for times in (ours, theirs))
    return Trial(
        len(groups),
        num_tokens,
        batch.attended.numel() / num_tokens,
        seconds,
        hf_seconds,
        statistics.median(wall for _, wall in ours[1:]),
        hf_seconds / seconds,
        largest,
    )


def _timed(step: Callable[[], None]) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of one call."""
    cpu, wall = time.process_time(), time.perf_counter()
    step()
    return time.process_time() - cpu, time.perf_counter() - wall


def _weight_difference(policy: Policy, plain: PlainTrainer) -> float:
    """Max abs difference of the embeddings of both: they have taken the same step, or one of them another."""
    ours = policy.trainable.masters()["embedding.word_embeddings.weight"]
    return float((ours - plain.model.get_parameter("model.embed_tokens.weight").detach()).abs().max())


def head_peak_bytes(num_tokens: int = HEAD_T, vocab_size: int = HEAD_V, hidden: int = HEAD_D) -> int:
    """Most bytes allocated at once by the head's forward and backward pass, beyond its inputs: every allocation counts."""
    draw = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(num_tokens, hidden, generator=draw).requires_grad_()
    weight_VD = (0.05 * torch.randn(vocab_size, hidden, generator=draw)).requires_grad_()
    targets_T = torch.randint(0, vocab_size, (num_tokens,), generator=draw)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        logprob, _ = token_logprobs(hidden_TD, weight_VD, targets_T)
        logprob.sum().backward()
    if profiler.profiler is None or profiler.profiler.kineto_results is None:
        raise AssertionError("torch recorded nothing")
    live = peak = 0
    events: list[Any] = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def measure(num_rounds: int = NUM_ROUNDS) -> dict[str, object]:
    """All trials, and the head."""
    learning = Learning(gate=Gate())
    policy = Policy(POLICY, learning, seed=0, layout_id=demo_layout().layout_id)
    groups = record(policy, max(STEP_GROUPS))
    trials = [trial(policy, groups[:num_groups], learning, num_rounds) for num_groups in STEP_GROUPS]
    best = trials[-1]
    return {
        "tokens_per_second": round(best.num_tokens / best.packed_seconds, 1),
        "padded_hf_tokens_per_second": round(best.num_tokens / best.padded_hf_seconds, 1),
        "speedup_vs_padded_hf": round(best.speedup, 3),
        "padding_ratio": round(best.padding_ratio, 3),
        "speedup_over_padding_ratio": round(best.speedup / best.padding_ratio, 3),
        "peak_logits_bytes": head_peak_bytes(),
        "num_tokens": best.num_tokens,
        "bounds": {
            "speedup": 1.5,
            "speedup_over_padding_ratio": 0.85,
            "padding_ratio": LEAST_PADDING_RATIO,
            "peak_logits_bytes": 268_435_456,
        },
        "all_logits_bytes": 4 * HEAD_V * HEAD_T,
        "dtype": learning.dtype,
        "num_threads": torch.get_num_threads(),
        "trials": [asdict(one) for one in trials],
    }


def main() -> None:
    """Print the numbers: JSON to standard output, or a few lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="steps of each trainer of which the median counts")
    asked = parser.parse_args()
    found = measure(asked.rounds)
    if asked.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        if isinstance(value, int | float):
            print(f"{name:40} {value}", file=sys.stdout)


if __name__ == "__main__":
    main()
