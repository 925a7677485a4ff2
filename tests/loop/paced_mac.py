"""A Mac's worker whose sweeps take seconds: `python -m tests.loop.paced_mac`, with the worker's own arguments.

The environment is paced: group g of a sweep ends after 4 + 6 g steps of a few hundred milliseconds, so a signal finds a
sweep half done. Sleep is told by files in the state folder: `sleep` before, which is answered by `slept`, and `wake`.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from environments.base import Environment, Limits, Outcome, Reply
from worker_mac.ending import leave
from worker_mac.worker import main, read_options

STEPS, MORE_STEPS, REPLY_SECONDS = 4, 6, 0.003


class Paced:
    """The questions of a real environment; every token is a turn, and each answer of the environment takes its time."""

    def __init__(self, real: Environment) -> None:
        self.real, self.name = real, real.name
        self.stop_ids = real.stop_ids
        self.limits = Limits(1000, 1, 4000)
        self.places = {question: place % 8 for place, question in enumerate(real.question_ids("train"))}

    def question_ids(self, split: str) -> Sequence[str]:
        return self.real.question_ids(split)  # type: ignore[arg-type]

    def prompt_ids(self, question_id: str) -> tuple[int, ...]:
        return self.real.prompt_ids(question_id)

    def reply(self, question_id: str, turns: Sequence[Sequence[int]]) -> Reply:
        time.sleep(REPLY_SECONDS)
        done = len(turns) >= STEPS + MORE_STEPS * self.places[question_id]
        return Reply((), True, "answered") if done else Reply((turns[0][0],), False, "")

    def score(self, question_id: str, turns: Sequence[Sequence[int]]) -> Outcome:
        return Outcome(float(turns[-1][0] % 2), {"odd": 1.0})


class FileSleeps:
    """Sleep that a test tells of."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ended = folder, threading.Event()

    def start(self, before_sleep: Callable[[], None], after_wake: Callable[[], None]) -> None:
        def listen() -> None:
            while not self.ended.wait(0.05):
                for name, told in (("sleep", before_sleep), ("wake", after_wake)):
                    if (self.folder / name).exists():
                        (self.folder / name).unlink()
                        told()
                        (self.folder / f"{name}-done").touch()

        threading.Thread(target=listen, daemon=True).start()

    def close(self) -> None:
        self.ended.set()


def make_engine(store: object, document: object, environment: Environment, **given: object) -> object:
    from worker_mac.engine import MacEngine

    return MacEngine(store, document, Paced(environment), **given)  # type: ignore[arg-type]


if __name__ == "__main__":
    folder = read_options(sys.argv[1:]).folder
    leave(main(make_engine=make_engine, sleeps=FileSleeps(folder)))  # type: ignore[arg-type]
