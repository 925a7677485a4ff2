"""The scripted episodes on mlx_lm's BatchGenerator, driven as well as it can be: what the Mac's engine is measured against.

Prompts are fed once a group and their cache is handed to each of its episodes; a turn that calls a tool leaves the batch
with its cache and is inserted again with the reply; all rows decode together. Each step pays for a categorical draw and
for the logprob of one token a row, as anybody would who trains on the result; what is drawn is then replaced by the
script's token, so that both engines play the same.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache


class Episodes(Protocol):
    """What is played: prompts of groups, the turns of each episode, the environment's replies."""

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """Of each group."""
        ...

    @property
    def turns(self) -> Sequence[Sequence[Sequence[int]]]:
        """Of each episode, group by group."""
        ...

    @property
    def group_size(self) -> int:
        """Episodes of a group."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Any of them ends a turn."""
        ...

    def reply_of(self, episode: int, num_turns: int) -> Sequence[int] | None:
        """What follows an episode's first turns; None if it ends there."""
        ...


@dataclass(slots=True)
class _Row:
    """One turn of an episode in the batch, and how many of its tokens were handed out and came back."""

    episode: int
    turn: int
    num_forced: int = 0
    num_seen: int = 0


@dataclass(frozen=True, slots=True)
class StockRun:
    """What a run took; `logprobs` of every sampled token, episode by episode."""

    seconds: float
    cpu_seconds: float
    num_prompt_tokens: int
    num_steps: int
    logprobs: list[list[float]]


class _Forcing:
    """A sampler that draws, and answers with the tokens of the script; it must know whose rows it is given."""

    def __init__(self, token_of: Callable[[int], int]) -> None:
        self._token_of = token_of
        self.batches: list[Callable[[], list[int]]] = []
        """The rows of each call to come, in order."""

    def __call__(self, logprobs: mx.array) -> mx.array:
        uids = self.batches.pop(0)()
        if len(uids) != logprobs.shape[0]:
            raise AssertionError(f"{logprobs.shape[0]} rows were sampled where {len(uids)} were expected")
        forced = mx.array([self._token_of(uid) for uid in uids])
        drawn = mx.random.categorical(logprobs)
        return mx.where(drawn < 0, drawn, forced)


def play(model: Any, script: Episodes) -> StockRun:
    """Play all episodes."""
    return _Driver(model, script).play()


class _Driver:
    """One run."""

    def __init__(self, model: Any, script: Episodes) -> None:
        self._model, self._script = model, script
        self._rows: dict[int, _Row] = {}
        self._logprobs: list[list[float]] = [[] for _ in script.turns]
        self._left = len(script.turns)
        self._num_prompt_tokens = self._num_steps = 0
        self._forcing = _Forcing(self._token_of)

    def play(self) -> StockRun:
        """Everything, from the prompts on."""
        started, cpu_started = time.monotonic(), time.process_time()
        num = len(self._script.turns)
        batch = BatchGenerator(
            self._model, max_tokens=1 << 20, stop_tokens=[[token] for token in self._script.stop_ids], sampler=self._forcing,
            completion_batch_size=num, prefill_batch_size=num, stream=mx.default_stream(mx.default_device()),
        )  # fmt: skip
        self._begin(batch)
        while self._left:
            _expect(batch, self._forcing)
            _, responses = batch.next()
            if responses:
                self._num_steps += 1
                self._take(batch, responses)
            del responses
        seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu_started
        batch.close()
        del batch
        gc.collect()
        return StockRun(seconds, cpu_seconds, self._num_prompt_tokens, self._num_steps, self._logprobs)

    def _token_of(self, uid: int) -> int:
        row = self._rows[uid]
        turn = self._script.turns[row.episode][row.turn]
        row.num_forced += 1
        return turn[row.num_forced - 1] if row.num_forced <= len(turn) else 0  # one token is computed beyond the last

    def _begin(self, batch: BatchGenerator) -> None:
        size = self._script.group_size
        for group, prompt in enumerate(self._script.prompts):
            cache = make_prompt_cache(self._model)
            if len(prompt) > 1:
                self._model(mx.array([list(prompt[:-1])]), cache=cache)
                mx.eval([part.state for part in cache])
                self._num_prompt_tokens += len(prompt) - 1
            caches = [cache] * size if len(prompt) > 1 else None
            for episode, uid in enumerate(batch.insert([[prompt[-1]]] * size, caches=caches), group * size):
                self._rows[uid] = _Row(episode, 0)

    def _take(self, batch: BatchGenerator, responses: Sequence[Any]) -> None:
        tokens = mx.array([response.token for response in responses])
        all_logprobs = mx.stack([response.logprobs for response in responses])
        taken = mx.take_along_axis(all_logprobs, tokens[:, None], axis=-1)[:, 0]
        for response, logprob in zip(responses, np.array(taken).tolist(), strict=True):
            row = self._rows[response.uid]
            self._logprobs[row.episode].append(logprob)
            row.num_seen += 1
            cache = response.prompt_cache
            if response.finish_reason is None:
                if row.num_seen < len(self._script.turns[row.episode][row.turn]):
                    continue
                # Out of its budget: what is in the cache holds the token already.
                cache = batch.remove([response.uid], return_prompt_caches=True)[response.uid][0]
            reply = self._script.reply_of(row.episode, row.turn + 1)
            if reply is None:
                self._left -= 1
                continue
            (uid,) = batch.insert([list(reply)], caches=[cache])
            self._num_prompt_tokens += len(reply)
            self._rows[uid] = _Row(row.episode, row.turn + 1)


def _expect(batch: Any, forcing: _Forcing) -> None:
    """Tell the sampler whose rows the next calls will be: those that decode, then those that come out of the prompt stage."""
    forcing.batches.clear()
    if len(batch._generation_batch):
        uids = list(batch._generation_batch.uids)
        forcing.batches.append(lambda: uids)
    queued = [sequence[0] for sequence in batch._unprocessed_sequences]
    before = [*batch._prompt_batch.uids, *queued]

    def came_out() -> list[int]:
        stay = {*batch._prompt_batch.uids, *(sequence[0] for sequence in batch._unprocessed_sequences)}
        return [uid for uid in before if uid not in stay]

    forcing.batches.append(came_out)
