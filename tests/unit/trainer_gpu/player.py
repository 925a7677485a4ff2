"""A slow, plain sampler in torch, so that trainer tests have real groups without a Mac's engine."""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel

from environments import registry
from environments.base import Environment
from stoa.rollouts.records import Episode, Fingerprint, Group, Timings, Turn
from trainer_gpu import host
from trainer_gpu.model import forward_packed

POLICY = Path(__file__).parents[3] / "environments" / "search" / "policy"


@cache
def search() -> Environment:
    return registry.create("search", {}, (POLICY / "tokenizer.json").read_bytes())


@cache
def vocab_size() -> int:
    return json.loads((POLICY / "config.json").read_text())["vocab_size"]


@dataclass
class _Play:
    """One episode as it grows."""

    question_id: str
    ids: list[int]
    turns: list[tuple[int, int, bool]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    start: int = 0
    reason: str = ""

    def sampled(self) -> list[list[int]]:
        return [self.ids[start:end] for start, end, _ in self.turns]


def play(model: GPTModel, environment: Environment, question_ids: list[str], *, num_episodes: int, seed: int) -> list[list[Episode]]:
    """`num_episodes` episodes of every question, sampled at temperature 1 with one packed forward pass a token."""
    draw = torch.Generator().manual_seed(seed)
    plays = [_new(environment, q) for q in question_ids for _ in range(num_episodes)]
    while active := [p for p in plays if not p.reason]:
        lens = [len(p.ids) for p in active]
        with torch.no_grad():
            logits = forward_packed(model, torch.tensor([i for p in active for i in p.ids], device=host.device()), lens).cpu()
        log_p = torch.log_softmax(logits[torch.tensor(lens).cumsum(0) - 1], -1)
        tokens = torch.multinomial(log_p.exp(), 1, generator=draw).squeeze(1)
        for p, token, row in zip(active, tokens.tolist(), log_p, strict=True):
            p.ids.append(token)
            p.logprobs.append(float(row[token]))
            _advance(p, environment)
    episodes = [_episode(p, environment) for p in plays]
    return [episodes[i : i + num_episodes] for i in range(0, len(episodes), num_episodes)]


def group_of(episodes: list[Episode], *, run: str, host: str, sweep: int, group: int, version: int, state_id: str) -> Group:
    return Group(
        run, host, sweep, group, "train", episodes[0].question_id, version, state_id, 1.0, 0, tuple(episodes),
        Fingerprint("torch", "test"), Timings(1000.0, 2.0, 0.5, 0.25, 12, 0.75, 0.5, 3_000_000),
    )  # fmt: skip


def _new(environment: Environment, question_id: str) -> _Play:
    prompt = list(environment.prompt_ids(question_id))
    return _Play(question_id, prompt, start=len(prompt))


def _advance(p: _Play, environment: Environment) -> None:
    """After one more token: does the turn end, and then the episode?"""
    limits = environment.limits
    stopped = p.ids[-1] in environment.stop_ids
    length = len(p.ids) - p.start
    if not stopped and length < limits.max_turn_tokens and len(p.ids) < limits.max_episode_tokens:
        return
    p.turns.append((p.start, len(p.ids), stopped))
    reply = environment.reply(p.question_id, p.sampled())
    if reply.done:
        reasons = {"answered": "answered", "malformed": "malformed", "call_limit": "call_limit"}
        p.reason = reasons.get(reply.stop_reason, "token_limit")
    elif len(p.turns) == limits.max_turns:
        p.reason = "turn_limit"
    else:
        p.ids += reply.ids
        p.start = len(p.ids)


def _episode(p: _Play, environment: Environment) -> Episode:
    mask = np.zeros(len(p.ids), np.uint8)
    for start, end, _ in p.turns:
        mask[start:end] = 1
    outcome = environment.score(p.question_id, p.sampled())
    return Episode(
        p.question_id,
        np.array(p.ids, np.int32),
        mask,
        np.array(p.logprobs, np.float32),
        tuple(Turn(*turn) for turn in p.turns),
        outcome.reward,
        dict(outcome.parts),
        p.reason,  # pyright: ignore[reportArgumentType]
    )
