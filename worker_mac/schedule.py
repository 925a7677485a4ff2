"""Which sequences a step feeds: admission by free pages, prompts shared by the episodes of a group, parking, a budget of tokens.

Pure: numpy and the page accounting, no clock, no model. A sequence is an episode, or a stem: the beginning that several
sequences have in common, which is fed once and whose pages they share. Every running sequence with tokens that are not
in the cache is fed in each step: those with one token first, the others as far as the step's budget goes. Where pages
run out, the youngest is parked: it gives its pages back and is fed again from its stem on when there is room. Episodes
are in order of age: a lower number is older, and the oldest always goes on, so that everything ends.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from worker_mac.pages import Pages
from worker_mac.plan import Ints, Pairs, Work

ROOT_TOKENS: Final = 64
"""Prompts of different questions that begin alike for at least so many tokens share this beginning, in whole pages."""
ZERO_SLOT: Final = 0
"""The slot that sequences without a stem begin with."""


class State(IntEnum):
    """Of a sequence: not begun or parked; with pages; a stem that may be shared; over."""

    WAITING = 0
    RUNNING = 1
    READY = 2
    DONE = 3


_WAITING, _RUNNING, _READY, _DONE = (int(state) for state in State)
"""As numpy compares them at once; they are read a hundred times a step."""


@dataclass(slots=True)
class Counts:
    """What a schedule has done so far. `prompt_tokens`: of prompts, once for each time they were fed."""

    steps: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    parked: int = 0
    most_pages: int = 0


class Schedule:
    """The sequences of one sweep. Episodes are 0 .. E - 1 in the order given; stems come after them."""

    def __init__(
        self,
        prompts: Sequence[NDArray[np.int32]],
        questions: Sequence[int],
        pages: Pages,
        *,
        max_rows: int,
        max_tokens: int,
        expected_tokens: int = 0,
    ) -> None:
        """Episodes that begin with `prompts[questions[e]]`.

        max_rows: most episodes that run at once. max_tokens: longest episode. expected_tokens: how long an episode is
        likely to become; not admitted is what would not fit if all running ones became as long.
        """
        self.num_episodes = len(questions)
        stems, self._parent, self._shared = _stems(prompts, questions, pages.key.page_tokens)
        num = self.num_episodes + len(stems)
        self.ids = np.zeros((num, max_tokens + 1), np.int32)
        self.length = np.zeros(num, np.int64)
        for sequence, ids in enumerate([prompts[question] for question in questions] + stems):
            self.ids[sequence, : len(ids)] = ids
            self.length[sequence] = len(ids)
        self.prompt_length = self.length[: self.num_episodes].copy()
        # Of a stem all it has, of an episode all but the prompt's last token: what a stem of its prompt has or would have.
        self._prompts = np.concatenate([self.prompt_length - 1, self.length[self.num_episodes :]]).astype(np.int32)
        self.fed = np.zeros(num, np.int64)
        self.state = np.full(num, _WAITING, np.int8)
        self._awaits = np.zeros(num, bool)
        """An environment's reply: fed nothing until it is there, whatever its state."""
        self.counts = Counts()
        self._pages, self._max_rows = pages, max_rows
        if pages.num_pages < least_pages(pages, max_tokens):
            raise AssertionError(f"{pages.num_pages} pages cannot hold one episode of {max_tokens} tokens")
        self._expected_pages = pages.pages_for(expected_tokens)
        self._slots = np.full(num, ZERO_SLOT, np.int32)
        self.num_slots = 1 + max_rows + len(stems)
        """Slots for tails, the one of zeros included: stems have theirs beside those of the episodes that run."""
        self._free_slots = list(range(self.num_slots - 1, ZERO_SLOT, -1))
        self._tables = np.zeros((num, pages.pages_for(max_tokens) + 1), np.int32)
        self._held = np.zeros(num, np.int64)
        self._tail_shared = np.zeros(num, bool)
        self._children = np.bincount(self._parent[self._parent >= 0], minlength=num)
        self._questions = np.asarray(questions, np.int64)
        self._age = np.arange(num)
        """An episode's number; of a stem, that of the episode it was fed for."""
        self._page_copies: dict[int, Pairs] = {}
        self._slot_copies: dict[int, tuple[int, int]] = {}

    @property
    def num_running(self) -> int:
        """Episodes with pages."""
        return int((self.state[: self.num_episodes] == _RUNNING).sum())

    @property
    def is_over(self) -> bool:
        """True once every episode is done."""
        return bool((self.state[: self.num_episodes] == _DONE).all())

    def has_begun(self, episode: int) -> bool:
        """True if anything of an episode was ever fed beyond its stem, or it runs."""
        return bool(self.state[episode] != _WAITING or self.length[episode] > self.prompt_length[episode])

    def lineage(self, sequence: int) -> list[tuple[int, int]]:
        """The stems a sequence begins with, the nearest first, and how many tokens it has from each."""
        found: list[tuple[int, int]] = []
        while (parent := int(self._parent[sequence])) >= 0:
            found.append((parent, int(self._shared[sequence])))
            sequence = parent
        return found

    def append(self, sequences: NDArray[np.intp], tokens: Ints) -> None:
        """One more token, known but not fed, for each of these episodes."""
        self.ids[sequences, self.length[sequences]] = tokens
        self.length[sequences] += 1

    def extend(self, episode: int, tokens: Ints) -> None:
        """Several more tokens for one episode."""
        start = int(self.length[episode])
        self.ids[episode, start : start + len(tokens)] = tokens
        self.length[episode] = start + len(tokens)

    def hold(self, episode: int) -> None:
        """Feed this episode nothing before `go_on`: what follows its last token is not known."""
        self._awaits[episode] = True

    def go_on(self, episode: int) -> None:
        """Undo `hold`."""
        self._awaits[episode] = False

    def finish(self, sequence: int) -> None:
        """A sequence is over: its pages are free, and its stem's, once nobody else begins with it."""
        self._let_go(sequence)
        self.state[sequence] = _DONE
        parent = int(self._parent[sequence])
        if parent >= 0:
            self._children[parent] -= 1
            if not self._children[parent]:
                self.finish(parent)

    def forget_all(self) -> None:
        """What is in the cache is lost: everything that runs is parked."""
        for sequence in np.flatnonzero((self.state == _RUNNING) | (self.state == _READY)):
            self._park(int(sequence))

    def plan(self, budget_tokens: int, *, max_rows: int | None = None, may_begin: bool = True) -> Work | None:
        """What to feed now; None if nothing can be, which with `may_begin` means that all is over, or held.

        Args:
            budget_tokens: most tokens of the step.
            max_rows: most episodes that run; those that do are not parked for it.
            may_begin: False to start no group of which nothing has been played.
        """
        self._page_copies, self._slot_copies = {}, {}
        self._admit(self._max_rows if max_rows is None else max(1, min(max_rows, self._max_rows)), may_begin=may_begin)
        sequences, counts = self._with_room(budget_tokens)
        if not len(sequences):
            return None
        starts = self.fed[sequences]
        ends = starts + counts
        self.counts.steps += 1
        self.counts.most_pages = max(self.counts.most_pages, self._pages.num_used)
        width = int(self._pages.pages_for(int(ends.max())))
        if (counts == 1).all():
            tokens = self.ids[sequences, starts]
        else:
            tokens = np.concatenate([self.ids[s, start:end] for s, start, end in zip(sequences, starts, ends, strict=True)])
        return Work(
            sequences, starts.astype(np.int32), counts.astype(np.int32), (sequences < self.num_episodes) & (ends == self.length[sequences]),
            tokens, self._tables[sequences, :width], self._slots[sequences],
            [pair for pairs in self._page_copies.values() for pair in pairs], list(self._slot_copies.values()), self._prompts[sequences],
        )  # fmt: skip

    def advance(self, work: Work) -> None:
        """A step has fed what it was told to."""
        sequences = work.sequences
        prompt_left = np.zeros(len(sequences), np.int64)
        is_episode = sequences < self.num_episodes
        prompt_left[is_episode] = self.prompt_length[sequences[is_episode]] - 1 - self.fed[sequences[is_episode]]
        prompt_left[~is_episode] = work.counts[~is_episode]
        self.counts.prompt_tokens += int(np.clip(prompt_left, 0, work.counts).sum())
        self.counts.tokens += work.num_tokens
        self.fed[sequences] += work.counts
        stems = sequences[(~is_episode) & (self.fed[sequences] == self.length[sequences])]
        self.state[stems] = _READY

    def _with_room(self, budget_tokens: int) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Sequences that have pages for what they are to be fed; none if nobody runs."""
        while True:
            sequences, counts = self._chosen(budget_tokens)
            kept = self._make_room(sequences, counts)
            # Where all that were chosen had to be parked, others run.
            if kept.any() or not len(sequences):
                return sequences[kept], counts[kept]

    def _chosen(self, budget_tokens: int) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Running sequences in order of age, and how many tokens each gets."""
        running = np.flatnonzero((self.state == _RUNNING) & ~self._awaits)
        pending = (self.length - self.fed)[running]
        order = np.lexsort((self._age[running], pending != 1))
        counts = pending[order]
        over = np.cumsum(counts) - budget_tokens
        counts = np.clip(counts - np.maximum(over, 0), 0, None)
        if not counts.any() and len(counts):
            counts[0] = 1
        sequences = running[order]
        fed = counts > 0
        return sequences[fed], counts[fed]

    def _make_room(self, sequences: NDArray[np.intp], counts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Pages for what is to be fed, from the oldest to the youngest; False where the sequence had to be parked."""
        ends = self.fed[sequences] + counts
        size = self._pages.key.page_tokens
        needy = np.flatnonzero((-(-ends // size) > self._held[sequences]) | self._tail_shared[sequences])
        for index in needy[np.argsort(self._age[sequences[needy]], kind="stable")]:
            sequence, end = int(sequences[index]), int(ends[index])
            if self.state[sequence] != _RUNNING:
                continue
            start = int(self.fed[sequence])
            while (cost := self._pages.cost(sequence, start, end)) > self._pages.num_free:
                if not self._reclaim(sequence, cost):
                    break
            else:
                self._grow(sequence, start, end)
        return self.state[sequences] == _RUNNING

    def _grow(self, sequence: int, start: int, end: int) -> None:
        copies = self._pages.grow(sequence, start, end)
        if copies:
            self._page_copies[sequence] = copies
        self._tail_shared[sequence] = False
        self._read_table(sequence)

    def _read_table(self, sequence: int) -> None:
        table = self._pages.table(sequence)
        self._tables[sequence] = 0
        self._tables[sequence, : len(table)] = table
        self._held[sequence] = len(table)

    def _reclaim(self, sequence: int, cost: int) -> bool:
        """Free some pages for a sequence; False if the sequence itself had to go, being the youngest."""
        for victim in self._victims(sequence):
            if self.state[victim] == _RUNNING:
                self.counts.parked += 1
            self._park(victim)
            return victim != sequence
        raise AssertionError(f"{cost} pages are missing and nobody can be parked")

    def _victims(self, sequence: int) -> Iterator[int]:
        """Who gives way to a sequence, in order: idle stems of younger episodes, the youngest that is held or else runs, other stems."""
        own = int(self._parent[sequence])
        ready = [int(stem) for stem in np.flatnonzero(self.state == _READY)[::-1]]
        running = np.flatnonzero(self.state == _RUNNING)
        busy = set(self._parent[running].tolist())
        idle = [stem for stem in ready if stem != own and stem not in busy and self._frees(stem)]
        yield from (stem for stem in idle if self._age[stem] > self._age[sequence])
        if len(running) > 1:
            held = running[self._awaits[running]]
            choice = held if len(held) else running
            yield int(choice[self._age[choice].argmax()])
        yield from idle
        yield from (stem for stem in ready if self._frees(stem))

    def _frees(self, sequence: int) -> bool:
        return any(self._pages.uses(page) == 1 for page in self._pages.table(sequence))

    def _park(self, sequence: int) -> None:
        self._let_go(sequence)
        self.fed[sequence] = 0
        self.state[sequence] = _WAITING

    def _let_go(self, sequence: int) -> None:
        self._pages.release(sequence)
        if self._slots[sequence] != ZERO_SLOT:
            self._free_slots.append(int(self._slots[sequence]))
        self._slots[sequence] = ZERO_SLOT
        self._held[sequence] = 0
        self._tail_shared[sequence] = False
        # What was to be copied for it is not, so that nothing is copied over who gets its pages.
        self._page_copies.pop(sequence, None)
        self._slot_copies.pop(sequence, None)

    def _admit(self, max_rows: int, *, may_begin: bool) -> None:
        """Give slots and shared pages to who waits, the oldest first, as far as slots and pages go."""
        waiting = np.flatnonzero((self.state == _WAITING)[: self.num_episodes] & ~self._awaits[: self.num_episodes])
        if not len(waiting):
            return
        begun = None if may_begin else {int(self._questions[e]) for e in range(self.num_episodes) if self.has_begun(e)}
        promised = self._promised()
        is_running = self.state == _RUNNING
        num_running, num_rows = int(is_running.sum()), int(is_running[: self.num_episodes].sum())
        for episode in waiting.tolist():
            if begun is not None and int(self._questions[episode]) not in begun:
                continue
            if num_rows >= max_rows:
                return
            sequence = self._next_to_feed(episode)
            if sequence is None:
                continue
            wanted = self._wanted_pages(sequence)
            # Once pages have run out, whoever comes back leaves every running one room for a page: it would be parked again.
            headroom = num_rows if self.counts.parked else 0
            if wanted + promised + headroom > self._pages.num_free and num_running:
                return
            self._age[sequence] = episode
            self._begin(sequence)
            num_running, num_rows = num_running + 1, num_rows + (sequence == episode)
            promised += wanted

    def _next_to_feed(self, sequence: int) -> int | None:
        """The sequence itself, or the stem that has to be fed before it; None if one is being fed."""
        parent = int(self._parent[sequence])
        if parent < 0 or self.state[parent] == _READY:
            return sequence
        return None if self.state[parent] == _RUNNING else self._next_to_feed(parent)

    def _promised(self) -> int:
        """Pages that running episodes are still expected to take."""
        running = np.flatnonzero(self.state == _RUNNING)
        full = -(-self.length[running] // self._pages.key.page_tokens)
        full = np.where(running < self.num_episodes, np.maximum(full, self._expected_pages), full)
        return int(np.clip(full - self._held[running] + self._tail_shared[running], 0, None).sum())

    def _wanted_pages(self, sequence: int) -> int:
        """Pages that a sequence is expected to take beyond those it shares."""
        shared = int(self._shared[sequence]) // self._pages.key.page_tokens
        own = self._pages.pages_for(int(self.length[sequence]))
        return (max(own, self._expected_pages) if sequence < self.num_episodes else own) - shared

    def _begin(self, sequence: int) -> None:
        parent, shared = int(self._parent[sequence]), int(self._shared[sequence])
        self.state[sequence] = _RUNNING
        self._slots[sequence] = self._free_slots.pop()
        source = ZERO_SLOT
        if parent >= 0:
            self._pages.share(sequence, parent, shared)
            self._read_table(sequence)
            self.fed[sequence] = shared
            self._tail_shared[sequence] = shared % self._pages.key.page_tokens != 0
            source = int(self._slots[parent])
        self._slot_copies[sequence] = (source, int(self._slots[sequence]))


def least_pages(pages: Pages, max_tokens: int) -> int:
    """The smallest pool in which every episode ends: the scrap page, one episode, and its stem's last page beside the copy."""
    return pages.pages_for(max_tokens) + 2


def _stems(
    prompts: Sequence[NDArray[np.int32]], questions: Sequence[int], page_tokens: int
) -> tuple[list[NDArray[np.int32]], NDArray[np.int64], NDArray[np.int64]]:
    """What sequences begin with: stems, each sequence's stem (-1: none), and how many tokens it shares with it.

    A stem is all but the last token of a prompt that several episodes have: the output of the last one is drawn from
    by each. Above them stands the root, the beginning that all prompts have in common, if it is long.
    """
    num_episodes = len(questions)
    num_plays = np.bincount(np.asarray(questions, np.int64), minlength=len(prompts))
    common = _common_tokens(prompts, page_tokens)
    root_tokens = common if len(prompts) > 1 and common >= ROOT_TOKENS else 0
    stems: list[NDArray[np.int32]] = []
    stem_of: dict[int, int] = {}
    for question, prompt in enumerate(prompts):
        if num_plays[question] > 1 and len(prompt) - 1 > root_tokens:
            stem_of[question] = num_episodes + len(stems)
            stems.append(prompt[:-1])
    root = num_episodes + len(stems) if root_tokens else -1
    parents = [stem_of.get(question, root) for question in questions] + [root] * len(stems)
    shared = [len(prompts[question]) - 1 if question in stem_of else root_tokens for question in questions]
    shared += [root_tokens] * len(stems)
    if root_tokens:
        stems.append(prompts[0][:root_tokens])
        parents.append(-1)
        shared.append(0)
    return stems, np.array(parents, np.int64), np.array(shared, np.int64)


def _common_tokens(prompts: Sequence[NDArray[np.int32]], page_tokens: int) -> int:
    """Tokens that all prompts begin with, less the last of each, in whole pages."""
    size = min((len(prompt) - 1 for prompt in prompts), default=0)
    if size < ROOT_TOKENS:
        return 0
    columns = np.stack([prompt[:size] for prompt in prompts])
    differ = np.flatnonzero((columns != columns[0]).any(axis=0))
    common = int(differ[0]) if len(differ) else size
    return common - common % page_tokens
