"""The environment as the trainer's side uses it: what an episode's ids must be, and what it is worth.

`stoa.rollouts.admit` and the examiner distrust Macs with it; both work everything out again from sampled ids. No torch
here: the control process imports this too.
"""

from collections.abc import Callable, Sequence

from environments.base import Environment
from stoa.bucket.keys import GroupKey
from stoa.config.run import RunConfig
from stoa.rollouts.admit import Replayed, Rules


class Referee:
    """Bound to one environment. All methods are pure, and safe from any thread."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def prompt_ids_of(self, question_id: str) -> tuple[int, ...]:
        """The ids an episode of this question begins with. Raises UnknownNameError."""
        return self._environment.prompt_ids(question_id)

    def rescore(self, question_id: str, turns: Sequence[Sequence[int]]) -> Replayed:
        """What the environment appended after each sampled turn, and the score of them all.

        Raises EpisodeOverError if turns follow one that had ended the episode.
        """
        replies = [self._environment.reply(question_id, turns[: k + 1]) for k in range(len(turns))]
        outcome = self._environment.score(question_id, turns)
        return Replayed(tuple(reply.ids for reply in replies), outcome.reward, outcome.parts, replies[-1].done)


def rules_of(
    config: RunConfig,
    environment: Environment,
    vocab_size: int,
    known: Callable[[int], str | None],
    granted: Callable[[GroupKey], str | None] | None = None,
    routing: tuple[int, int, int] | None = None,
) -> Rules:
    """What an honest group of this run looks like; `known`, `granted` and `routing` as in `Rules`."""
    limits = environment.limits
    return Rules(
        run=config.run,
        vocab_size=vocab_size,
        min_group_size=config.rollout.min_group_size,
        group_size=config.rollout.group_size,
        max_turns=limits.max_turns,
        max_turn_tokens=limits.max_turn_tokens,
        max_episode_tokens=limits.max_episode_tokens,
        stop_ids=environment.stop_ids,
        known=known,
        granted=granted,
        fingerprints=frozenset(config.rollout.fingerprints),
        routing=routing,
    )
