"""Which episodes of a run are in the bucket: a row for each, read from at most so many groups."""

from collections.abc import Sequence
from dataclasses import dataclass

from cli.transcript import Reader, episode_id
from stoa.bucket import keys
from stoa.bucket.run_document import RunDocument
from stoa.bucket.store import Store
from stoa.contracts.errors import FormatError, UsageError


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One episode in a list."""

    id: str
    question_id: str
    host: str
    reward: float
    num_turns: int
    num_sampled: int
    stop_reason: str


def episodes_of(store: Store, document: RunDocument, version: int | None, limit: int) -> tuple[int, tuple[EpisodeRow, ...]]:
    """The version and its episodes, of at most `limit` groups by key; version -1 and none if the bucket has no group.

    A group that cannot be decoded, or was cleared meanwhile, is passed over.
    """
    found = _keys(store, document.run, version)
    if not found:
        return -1 if version is None else version, ()
    reader = Reader(store, document)
    rows: list[EpisodeRow] = []
    for key in found[:limit]:
        try:
            group = reader.group(key)
        except (FormatError, UsageError):
            continue
        rows += [
            EpisodeRow(episode_id(key, i), e.question_id, group.host, e.reward, len(e.turns), len(e.logprobs), e.stop_reason)
            for i, e in enumerate(group.episodes)
        ]
    return keys.parse_group(found[0]).version, tuple(rows)


def _keys(store: Store, run: str, version: int | None) -> Sequence[str]:
    prefix = keys.groups_prefix(run) if version is None else keys.groups_of_version(run, version)
    found = list(keys.ours((listed.key for listed in store.list(prefix)), keys.parse_group))
    newest = max((parts.version for _, parts in found), default=-1)
    return sorted(key for key, parts in found if parts.version == newest)
