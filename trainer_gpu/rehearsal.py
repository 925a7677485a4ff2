"""Plays held-out questions with a plain torch policy, to measure a warm start without any worker.

No cache and no batching tricks: every token is a full forward pass. The Mac worker's engine is the fast one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from environments.base import Environment, Outcome

# B rows, T tokens, V vocabulary.


@dataclass(frozen=True, slots=True)
class Rates:
    """Shares over played questions; `right_with_search` and `right_without` are pass@1 within either part."""

    num_questions: int
    pass_at_1: float
    search_rate: float
    right_with_search: float
    right_without: float
    malformed: float


@torch.no_grad()
def play(model: nn.Module, environment: Environment, question_ids: Sequence[str], seed: int) -> list[Outcome]:
    """Sample one episode a question at temperature 1, without filters; outcomes in the order of the questions."""
    generator = torch.Generator().manual_seed(seed)
    ids = [list(environment.prompt_ids(question_id)) for question_id in question_ids]
    turns: list[list[list[int]]] = [[[]] for _ in question_ids]
    live = list(range(len(question_ids)))
    while live:
        for row, token_id in zip(live, _sample(model, [ids[row] for row in live], generator), strict=True):
            ids[row].append(token_id)
            turns[row][-1].append(token_id)
        live = [row for row in live if not _finished(environment, question_ids[row], ids[row], turns[row])]
    return [environment.score(question_id, played) for question_id, played in zip(question_ids, turns, strict=True)]


def rates(outcomes: Sequence[Outcome]) -> Rates:
    """Summarise outcomes."""
    with_search = [outcome.reward for outcome in outcomes if outcome.parts["searched"]]
    without = [outcome.reward for outcome in outcomes if not outcome.parts["searched"]]
    return Rates(
        num_questions=len(outcomes),
        pass_at_1=_mean([outcome.reward for outcome in outcomes]),
        search_rate=len(with_search) / len(outcomes),
        right_with_search=_mean(with_search),
        right_without=_mean(without),
        malformed=_mean([outcome.parts["malformed"] for outcome in outcomes]),
    )


def _finished(environment: Environment, question_id: str, ids: list[int], turns: list[list[int]]) -> bool:
    """Whether the episode ends here; a turn that ends gets the environment's ids appended, in place."""
    stopped = turns[-1][-1] in environment.stop_ids
    if not stopped and len(turns[-1]) < environment.limits.max_turn_tokens:
        return False
    reply = environment.reply(question_id, turns)
    if reply.done:
        return True
    ids.extend(reply.ids)
    turns.append([])
    return False


def _sample(model: nn.Module, rows: list[list[int]], generator: torch.Generator) -> list[int]:
    """The next token of each row. Rows are padded on the right, where a causal model cannot see."""
    length = max(map(len, rows))
    ids_BT = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    last_B = torch.tensor([len(row) - 1 for row in rows])
    logits_BTV = model(input_ids=ids_BT).logits
    logits_BV = logits_BTV[torch.arange(len(rows)), last_B].float()
    return torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)[:, 0].tolist()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
