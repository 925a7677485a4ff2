"""What an invited Mac's key can do at a real bucket: read what it needs, and nothing else. And no flood with tickets."""

from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from stoa.bucket import keys
from stoa.bucket.store import Store
from stoa.bucket.tickets import Mint, Slots, TicketBook
from stoa.bucket.uploads import TicketTarget
from stoa.contracts.errors import AccessDeniedError, ObjectExistsError, ObjectMissingError, TicketError
from stoa.weights.sync import Puller
from tests.servers import CREDENTIALS, MAC_CREDENTIALS, BucketServer
from tests.unit.weights.small_run import SmallRun

GROUPS = [keys.group("small", 0, host, 0, 0) for host in ("mac-1", "mac-2")]


@pytest.fixture
def mac(bucket_server: BucketServer, store: Store) -> Store:
    """The same bucket with an invited Mac's key."""
    return bucket_server.store(store.settings.name, credentials=MAC_CREDENTIALS)


def test_a_macs_key_pulls_every_version(store: Store, mac: Store, tmp_path: Path) -> None:
    run = SmallRun(store, tmp_path / "trainer")
    run.publish_many(3, anchor_every=2)
    state = Puller(mac, run.document, tmp_path / "mac").join(run.head)
    assert run.publisher.mirror is not None
    assert state.state_id() == run.publisher.mirror.state_id()


def test_what_is_not_there_yet_is_told_apart_from_what_may_not_be_read(store: Store, mac: Store) -> None:
    store.create(GROUPS[0], b"x")
    with pytest.raises(ObjectMissingError):
        mac.get(keys.head("small"), max_bytes=10)
    with pytest.raises(ObjectMissingError):
        mac.get(keys.run_json("small"), max_bytes=10)
    with pytest.raises(AccessDeniedError):
        mac.get(GROUPS[0], max_bytes=10)


def test_a_macs_key_reads_nothing_else_lists_nothing_writes_nothing_deletes_nothing(store: Store, mac: Store, tmp_path: Path) -> None:
    run = SmallRun(store, tmp_path / "trainer")
    run.publish()
    others = [*GROUPS, keys.grant("small", "mac-2", 0), keys.checkpoint("small", 1, 1, "manifest.json")]
    others += [keys.eval_part("small", 0, "first", 0, "mac-2"), keys.revocation("small", "mac-2"), "elsewhere"]
    # What these two tell would let a Mac under suspicion find out.
    others += [keys.step_manifest("small", 1, 1), keys.drop_note("small", 1, 0)]
    for key in others:
        store.create(key, b"x")
    head = store.get(keys.head("small"), max_bytes=10_000)
    name, client = mac.settings.name, mac._client
    tries = {
        **{f"read {key}": lambda key=key: client.get_object(Bucket=name, Key=key) for key in others},
        **{f"head {key}": lambda key=key: client.head_object(Bucket=name, Key=key) for key in others},
        "list": lambda: client.list_objects_v2(Bucket=name),
        "list its groups": lambda: client.list_objects_v2(Bucket=name, Prefix=keys.groups_of_sweep("small", 0, "mac-1", 0)),
        "list versions": lambda: client.list_objects_v2(Bucket=name, Prefix="runs/small/manifests/"),
        "list uploads": lambda: client.list_multipart_uploads(Bucket=name),
        "write HEAD": lambda: client.put_object(Bucket=name, Key=keys.head("small"), Body=b"x"),
        "swap HEAD": lambda: client.put_object(Bucket=name, Key=keys.head("small"), Body=b"x", IfMatch=head.etag),
        "write a manifest": lambda: client.put_object(Bucket=name, Key=keys.manifest("small", 9, 1, "0" * 64), Body=b"x"),
        "write its group": lambda: client.put_object(Bucket=name, Key=keys.group("small", 0, "mac-1", 0, 1), Body=b"x"),
        "write another's group": lambda: client.put_object(Bucket=name, Key=keys.group("small", 0, "mac-2", 0, 1), Body=b"x"),
        "undo a revocation": lambda: client.delete_object(Bucket=name, Key=keys.revocation("small", "mac-2")),
        "begin an upload": lambda: client.create_multipart_upload(Bucket=name, Key=GROUPS[0]),
        "copy": lambda: client.copy_object(
            Bucket=name, Key=keys.group("small", 0, "mac-1", 0, 2), CopySource=f"{name}/{keys.head('small')}"
        ),
        "delete HEAD": lambda: client.delete_object(Bucket=name, Key=keys.head("small")),
        "delete its group": lambda: client.delete_object(Bucket=name, Key=GROUPS[0]),
        "open the bucket": lambda: client.put_bucket_acl(Bucket=name, ACL="public-read"),
        "delete the bucket": lambda: client.delete_bucket(Bucket=name),
        "make a bucket": lambda: client.create_bucket(Bucket="mine-now"),
    }
    passed = []
    for what, attempt in tries.items():
        try:
            attempt()
            passed.append(what)
        except ClientError as error:
            assert error.response["ResponseMetadata"]["HTTPStatusCode"] == 403, what
    assert passed == []
    many = client.delete_objects(Bucket=name, Delete={"Objects": [{"Key": key} for key in (*GROUPS, keys.head("small"))]})
    assert "Deleted" not in many and len(many["Errors"]) == 3
    with pytest.raises(AccessDeniedError):
        mac.create(keys.group("small", 0, "mac-1", 0, 3), b"x")
    assert store.get(keys.head("small"), max_bytes=10_000) == head
    assert all(store.exists(key) for key in others)


def test_a_flood_of_groups_ends_at_the_tickets(store: Store, mac: Store, tmp_path: Path) -> None:
    """A Mac that means harm: with one key for all Macs it could fill groups/; now it creates what it was granted, once."""
    settings = store.settings
    mint = Mint("small", CREDENTIALS, settings.endpoint, settings.name, settings.region)
    book = TicketBook("small", "mac-1", tmp_path / "tickets")
    book.accept(mint.make("mac-1.0123abcd", "mac-1", [Slots(0, 0, 4, 8)]))
    target = TicketTarget(mac, book)
    outcomes = {"created": 0, "refused": 0}
    for version in range(6):
        for sweep in range(2):
            for group in range(10):
                for host in ("mac-1", "mac-2"):
                    for _ in range(2):
                        try:
                            target.create(keys.group("small", version, host, sweep, group), b"junk")
                            outcomes["created"] += 1
                        except (TicketError, ObjectExistsError):
                            outcomes["refused"] += 1
    assert outcomes == {"created": 4 * 8, "refused": 6 * 2 * 10 * 2 * 2 - 4 * 8}
    assert len(list(store.list("runs/"))) == 4 * 8
