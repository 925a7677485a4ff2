"""Which published version had which weights, after how many steps: what a group's claim of version and state_id is checked against.

Read from the signed manifests, backwards from HEAD, so a version of a trainer that lost its lease is never known. No
torch here: the control process imports this too.
"""

import threading

from stoa.bucket.head import Head
from stoa.bucket.manifest import Parent, read_manifest
from stoa.bucket.store import Store


class KnownVersions:
    """state_id and optimizer step by version, for the newest `window` + 1 versions. Safe from any thread."""

    def __init__(self, store: Store, run: str, public_key: str, *, window: int) -> None:
        self._store = store
        self._run = run
        self._public_key = public_key
        self._window = window
        self._lock = threading.Lock()
        self._states: dict[int, tuple[str, int]] = {}
        self._newest = -1

    @property
    def newest(self) -> int:
        """Newest version known; -1 before the first."""
        return self._newest

    def state_of(self, version: int) -> str | None:
        """The state_id of a version inside the window, else None."""
        with self._lock:
            return self._states.get(version, (None, 0))[0]

    def step_of(self, version: int) -> int | None:
        """The optimizer steps that a version inside the window has been through, else None."""
        with self._lock:
            return self._states.get(version, (None, None))[1]

    def add(self, version: int, state_id: str, step: int) -> None:
        """A version was published, of the weights after `step`; older ones leave the window."""
        with self._lock:
            self._states[version] = state_id, step
            self._newest = max(self._newest, version)
            for old in [v for v in self._states if v < self._newest - self._window]:
                del self._states[old]

    def follow(self, head: Head, oldest: int) -> None:
        """Read the manifests from HEAD's version back to `oldest`, or to the first one known."""
        link = Parent(head.version, head.manifest_key, head.manifest_sha256, "") if head.manifest_key else None
        found: dict[int, tuple[str, int]] = {}
        while link is not None and link.version >= oldest and self.state_of(link.version) is None:
            manifest = read_manifest(self._store, self._run, link.manifest_key, link.manifest_sha256, self._public_key)
            found[manifest.version] = manifest.state_id, manifest.step
            link = manifest.parent
        for version in sorted(found):
            self.add(version, *found[version])
