"""A task on bare ids for the Mac worker's tests, and rows that need no model.

Question "N" has a prompt of 6 + N ids. A turn ends with a stop id; after each of the first `num_turns - 1` turns the
environment appends three ids made from the turn; the reward is 1 if the last turn's first id is even.
"""

from collections.abc import Callable, Sequence

import numpy as np

from environments.base import Environment, Limits, Outcome, Question, Reply
from metal.sizes import PAGE_TOKENS
from stoa.contracts.errors import InfrastructureFaultError
from stoa.rollouts.records import Episode
from worker_mac.decoder import Decoder, Drawn
from worker_mac.model import Model
from worker_mac.pace import Pace
from worker_mac.pages import Pages, PoolKey
from worker_mac.plan import Work
from worker_mac.sweep import Casting, Played, Sweep, cast

STOPS = frozenset(range(24))


class Dialogue:
    name = "dialogue"

    def __init__(self, *, num_turns: int = 3, max_turn_tokens: int = 12, stop_ids: frozenset[int] = STOPS) -> None:
        self.num_turns = num_turns
        self.limits = Limits(4, max_turn_tokens, 128)
        self.stop_ids = stop_ids
        self.faults: set[str] = set()

    def question_ids(self, split: str) -> list[str]:
        return [str(number) for number in (range(40) if split == "train" else range(40, 60))]

    def question(self, question_id: str) -> Question:
        return Question(question_id, question_id, (), "train", "")

    def prompt_ids(self, question_id: str) -> tuple[int, ...]:
        return tuple(30 + (7 * int(question_id) + place) % 200 for place in range(6 + int(question_id)))

    def reply(self, question_id: str, turns: Sequence[Sequence[int]]) -> Reply:
        if question_id in self.faults:
            raise InfrastructureFaultError("the tool's server is away")
        if turns[-1][-1] not in self.stop_ids:
            return Reply((), True, "malformed")
        if len(turns) < self.num_turns:
            return Reply((100, 30 + turns[-1][0] % 50, 101), False, "")
        return Reply((), True, "answered")

    def score(self, question_id: str, turns: Sequence[Sequence[int]]) -> Outcome:
        return Outcome(float(turns[-1][0] % 2 == 0), {"turns": float(len(turns))})


class ScriptedRows:
    """Rows whose next token is a function of what they were fed: (ids so far) -> next id. Checks how it is used.

    What a sequence was fed is read back from the pages and slots it is said to have, so that sharing, copies and parking
    are checked as well.
    """

    def __init__(self, next_id: Callable[[list[int]], int]) -> None:
        self.next_id = next_id
        self.pages: dict[int, list[int | None]] = {}
        self.slots: dict[int, list[int]] = {0: []}
        """The last two ids fed, as a convolution of three taps remembers them."""
        self.steps: list[int] = []
        self.fed_tokens = 0

    def reset(self) -> None:
        self.pages, self.slots = {}, {0: []}

    def step(self, work: Work, uniform: np.ndarray) -> Drawn:
        assert len(work.sequences) == len(set(work.sequences.tolist())) == len(uniform)
        pages = {target: list(self.pages[source]) for source, target in work.page_copies}
        slots = {target: list(self.slots[source]) for source, target in work.slot_copies}
        assert len(pages) == len(work.page_copies)
        assert 0 not in pages and 0 not in slots
        self.pages |= pages
        self.slots |= slots
        written: list[tuple[int, int]] = []
        drawn = []
        offset = 0
        for row, count in enumerate(work.counts.tolist()):
            ids = work.tokens[offset : offset + count].tolist()
            offset += count
            start, slot = int(work.starts[row]), int(work.slots[row])
            assert slot > 0
            for place, token in enumerate(ids, start):
                page = int(work.tables[row, place // PAGE_TOKENS])
                assert page > 0
                written.append((page, place % PAGE_TOKENS))
                self.pages.setdefault(page, [None] * PAGE_TOKENS)[place % PAGE_TOKENS] = token
            cells = [self.pages[int(page)] for page in work.tables[row, : -(-(start + count) // PAGE_TOKENS)]]
            fed = [token for cell in cells for token in cell][: start + count]
            assert None not in fed
            self.slots[slot] = (self.slots[slot] + ids)[-2:]
            assert self.slots[slot] == fed[-2:]
            if work.samples[row]:
                drawn.append(self.next_id(fed))
        assert len(written) == len(set(written)) == work.num_tokens == offset
        self.fed_tokens += offset
        self.steps.append(int(work.samples.sum()))
        return Drawn(np.array(drawn, np.int32), -uniform[work.samples])


class Fixed(Pace):
    """Steps of at most so many tokens, whatever they take."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.tokens = num_tokens

    def saw(self, num_tokens: int, seconds: float) -> None:
        pass


def play(
    rows: ScriptedRows | Model,
    environment: Environment,
    castings: Sequence[Casting],
    *,
    num_pages: int | None = None,
    max_rows: int | None = None,
    pace: Pace | None = None,
    expected_tokens: int = 0,
    **options: object,
) -> tuple[Played, dict[int, list[Episode]]]:
    """One sweep; on a model with a decoder made for it. `options` are the decoder's, or those of `Sweep.play`."""
    longest = -(-environment.limits.max_episode_tokens // PAGE_TOKENS)
    pages = Pages(num_pages or 2 + 2 * (len(castings) + 1) * longest, PoolKey(0, "", PAGE_TOKENS, "float32"))
    schedule = cast(environment, castings, pages, max_rows=max_rows or max(1, len(castings)), expected_tokens=expected_tokens)
    playing = {name: options.pop(name) for name in ("should_stop", "on_step", "rows_allowed") if name in options}
    if isinstance(rows, Model):
        rows = Decoder(rows, pages.num_pages, schedule.num_slots, **options)
    found: dict[int, list[Episode]] = {}
    played = Sweep(rows, schedule, environment, castings, found.__setitem__, pace=pace).play(**playing)
    if played.ended:
        assert pages.num_used == 0
    return played, found
