"""Which versions are known: those HEAD's manifests lead to, and no orphan."""

from stoa.bucket.head import HEAD_FORMAT, Head
from stoa.bucket.manifest import MANIFEST_FORMAT, AnchorRef, Manifest, Parent, Signer, VersionStats, write_manifest
from stoa.bucket.store import Store
from trainer_gpu.versions import KnownVersions


def chain(store: Store, signer: Signer, count: int) -> list[tuple[Manifest, str, str]]:
    """Manifests of versions 0 .. count - 1, each following the one before."""
    made: list[tuple[Manifest, str, str]] = []
    for version in range(count):
        parent = Parent(version - 1, made[-1][1], made[-1][2], made[-1][0].state_id) if made else None
        anchor = AnchorRef(0, "state-0", "k", "s", 1)
        manifest = Manifest(
            MANIFEST_FORMAT,
            "test",
            1001,
            version,
            parent,
            f"state-{version}",
            "l",
            4 * version,
            0.0,
            None,
            (),
            anchor,
            {},
            VersionStats(0.0, 0, 0.0),
        )
        made.append((manifest, *write_manifest(store, manifest, signer)))
    return made


def head(version: int, key: str, sha256: str) -> Head:
    return Head(HEAD_FORMAT, "test", 1001, "o", 1, "n", "running", version, key, sha256, 0, "", "", 0.0)


def test_manifests_are_followed_back_to_the_oldest_wanted(store: Store) -> None:
    signer = Signer.generate()
    made = chain(store, signer, 6)
    known = KnownVersions(store, "test", signer.public_key, window=2)
    known.follow(head(5, *made[5][1:]), oldest=3)
    assert [known.state_of(v) for v in range(6)] == [None, None, None, "state-3", "state-4", "state-5"]
    assert [known.step_of(v) for v in (2, 3, 5)] == [None, 12, 20]
    assert known.newest == 5
    requests = store.meters.by_kind()["manifests"].requests_down
    known.follow(head(5, *made[5][1:]), oldest=3)
    assert store.meters.by_kind()["manifests"].requests_down == requests


def test_new_version_pushes_the_oldest_out(store: Store) -> None:
    known = KnownVersions(store, "test", "", window=1)
    for version in range(3):
        known.add(version, f"state-{version}", 4 * version)
    assert [known.state_of(v) for v in range(4)] == [None, "state-1", "state-2", None]
    assert [known.step_of(v) for v in range(4)] == [None, 4, 8, None]


def test_nothing_is_known_before_the_first_version(store: Store) -> None:
    known = KnownVersions(store, "test", "", window=1)
    known.follow(head(-1, "", ""), oldest=-9)
    assert (known.newest, known.state_of(0)) == (-1, None)
