"""HEAD: fencing, compare-and-swap, lost replies, state changes that come between, and replies nobody should trust."""

import itertools
import threading
import time

import pytest

from stoa.bucket import keys
from stoa.bucket.head import HeadWriter, Reset, poll_head, read_head
from stoa.bucket.manifest import Signer
from stoa.bucket.store import Store
from stoa.contracts.errors import FencedError, FormatError, ObjectMissingError, PreconditionError, ServiceUnavailableError, SignatureError
from tests.servers import CREDENTIALS
from tests.unit.bucket.flaky import flaky_proxy

SIGNER = Signer.from_seed(b"k" * 32)


def writer(store: Store, owner: str = "first", interval_seconds: float = 0.0) -> HeadWriter:
    return HeadWriter(store, "demo", SIGNER, owner=owner, interval_seconds=interval_seconds)


def test_first_acquire_makes_a_head_without_a_version(store: Store):
    with pytest.raises(ObjectMissingError):
        read_head(store, "demo", SIGNER.public_key)
    head = writer(store).acquire(1000)
    assert (head.epoch, head.version, head.manifest_key, head.state, head.owner) == (1000, -1, "", "running", "first")
    again, _ = read_head(store, "demo", SIGNER.public_key)
    assert again.nonce == head.nonce


def test_swap_changes_what_it_names_and_nothing_else(store: Store):
    first = writer(store)
    before = first.acquire(1000)
    after = first.swap(1000, version=0, manifest_key="m", manifest_sha256="s", step=4, published_at=12.5)
    assert (after.version, after.step, after.published_at, after.epoch, after.state) == (0, 4, 12.5, 1000, "running")
    assert after.seq == before.seq + 1
    assert after.nonce != before.nonce
    read, _ = read_head(store, "demo", SIGNER.public_key)
    assert read.version == 0


@pytest.mark.parametrize("token", [1000, 999])
def test_lease_that_is_not_newer_is_fenced(store: Store, token: int):
    writer(store).acquire(1000)
    with pytest.raises(FencedError):
        writer(store, "second").acquire(token)


def test_trainer_that_lost_its_lease_can_write_nothing(store: Store):
    old = writer(store)
    old.acquire(1000)
    new = writer(store, "second")
    new.acquire(2000)
    with pytest.raises(FencedError):
        old.swap(1000, version=0)
    with pytest.raises(FencedError):
        old.acquire(1001)
    assert new.swap(2000, version=0).version == 0


def test_version_that_moved_under_the_same_lease_is_fenced(store: Store):
    one, twin = writer(store), writer(store)
    one.acquire(1000)
    twin.swap(1000, version=0)
    with pytest.raises(FencedError, match="version moved"):
        one.swap(1000, version=0, manifest_key="other")


def test_state_set_between_two_swaps_is_kept(store: Store):
    trainer, control = writer(store), writer(store, "control")
    trainer.acquire(1000)
    control.set_state("paused", "n1")
    assert trainer.swap(1000, version=0).state == "paused"
    assert control.set_state("running", "n2").version == 0


def test_state_set_in_the_middle_of_a_swap_is_kept(store: Store):
    control = writer(store, "control")
    interrupted: list[int] = []

    class Interrupted(Store):
        def swap(self, key: str, data: bytes, etag: str | None) -> str:
            if not interrupted and b'"version":0' in data:
                interrupted.append(1)
                control.set_state("draining", "n1")
            return super().swap(key, data, etag)

    trainer = writer(Interrupted(store.settings, CREDENTIALS))
    trainer.acquire(1000)
    head = trainer.swap(1000, version=0)
    assert interrupted
    assert (head.version, head.state) == (0, "draining")


def test_setting_the_same_state_again_writes_nothing(store: Store):
    control = writer(store)
    control.acquire(1000)
    first = control.set_state("paused", "n1")
    assert control.set_state("paused", "n1") == first
    assert control.set_state("paused", "n2").seq == first.seq


def test_state_of_a_run_no_trainer_ever_took_is_missing(store: Store):
    with pytest.raises(ObjectMissingError):
        writer(store).set_state("stopped", "n1")


def test_state_change_that_meets_a_new_lease_is_fenced(store: Store):
    taken: list[int] = []

    class TakenOver(Store):
        def swap(self, key: str, data: bytes, etag: str | None) -> str:
            if not taken:
                taken.append(1)
                writer(store, "second").acquire(2000)
            return super().swap(key, data, etag)

    writer(store).acquire(1000)
    with pytest.raises(FencedError, match="changed hands"):
        writer(TakenOver(store.settings, CREDENTIALS), "control").set_state("paused", "n1")


def test_swap_and_acquire_whose_reply_is_lost_succeed_once(store: Store):
    with flaky_proxy(store.settings.endpoint) as proxy:
        trainer = writer(Store(store.settings.model_copy(update={"endpoint": proxy.endpoint}), CREDENTIALS))

        class Swallowing:
            """Drops the reply to the next PUT, not to the GET before it."""

            def __init__(self, inner: Store) -> None:
                self.inner = inner

            def get(self, key: str, *, max_bytes: int):
                return self.inner.get(key, max_bytes=max_bytes)

            def swap(self, key: str, data: bytes, etag: str | None) -> str:
                proxy.swallow = 1
                return self.inner.swap(key, data, etag)

        trainer._store = Swallowing(trainer._store)
        head = trainer.acquire(1000)
        assert head.seq == 1
        assert trainer.swap(1000, version=0, manifest_key="m").seq == 2
    read, _ = read_head(store, "demo", SIGNER.public_key)
    assert (read.seq, read.version) == (2, 0)


class Unanswered(Store):
    """The next swap arrives, but its call ends without an answer."""

    armed = False

    def swap(self, key: str, data: bytes, etag: str | None) -> str:
        written = super().swap(key, data, etag)
        if self.armed:
            self.armed = False
            raise ServiceUnavailableError("no answer")
        return written


def test_version_whose_swap_was_given_up_on_but_arrived_is_no_other_writers(store: Store):
    unanswered = Unanswered(store.settings, CREDENTIALS)
    trainer = writer(unanswered)
    trainer.acquire(1000)
    unanswered.armed = True
    with pytest.raises(ServiceUnavailableError):
        trainer.swap(1000, version=0, manifest_key="first")
    writer(store, "control").set_state("paused", "n1")
    head = trainer.swap(1000, version=0, manifest_key="sealed-again")
    assert (head.version, head.manifest_key, head.state) == (0, "sealed-again", "paused")
    assert trainer.swap(1000, version=1, manifest_key="next").version == 1


def test_version_of_another_writer_after_a_swap_without_an_answer_is_fenced(store: Store):
    class Silent(Store):
        def swap(self, key: str, data: bytes, etag: str | None) -> str:
            raise ServiceUnavailableError("no answer")

    trainer, twin = writer(store), writer(store)
    trainer.acquire(1000)
    trainer._store = Silent(store.settings, CREDENTIALS)
    with pytest.raises(ServiceUnavailableError):
        trainer.swap(1000, version=0, manifest_key="mine")
    trainer._store = store
    twin.swap(1000, version=0, manifest_key="other")
    with pytest.raises(FencedError, match="version moved"):
        trainer.swap(1000, version=0, manifest_key="mine")


def test_acquire_puts_the_step_back_to_the_checkpoint_it_read(store: Store):
    old = writer(store)
    old.acquire(1000)
    old.swap(1000, step=8, step_manifest_key="s8", checkpoint_key="c8")
    old.swap(1000, step=12, step_manifest_key="s12")
    head = writer(store, "second").acquire(2000, Reset("c8", 8, "s8"))
    assert (head.step, head.step_manifest_key, head.checkpoint_key, head.epoch) == (8, "s8", "c8", 2000)


def test_acquire_from_a_checkpoint_that_is_no_longer_named_is_refused(store: Store):
    old = writer(store)
    old.acquire(1000)
    old.swap(1000, step=12, checkpoint_key="c12")
    with pytest.raises(PreconditionError):
        writer(store, "second").acquire(2000, Reset("c8", 8, "s8"))
    assert read_head(store, "demo", SIGNER.public_key)[0].epoch == 1000


def test_of_racing_trainers_the_highest_token_holds_the_run(store: Store):
    errors: list[Exception] = []

    def race(token: int) -> None:
        try:
            writer(store, f"owner{token}").acquire(token)
        except FencedError as error:
            errors.append(error)

    threads = [threading.Thread(target=race, args=(token,)) for token in (1001, 1002, 1003, 1004)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    head, _ = read_head(store, "demo", SIGNER.public_key)
    assert (head.epoch, head.owner) == (1004, "owner1004")


def test_two_writes_are_an_interval_apart(store: Store):
    trainer = writer(store, interval_seconds=0.4)
    started = time.monotonic()
    trainer.acquire(1000)
    trainer.swap(1000, version=0)
    trainer.swap(1000, version=1)
    assert time.monotonic() - started >= 0.8


def test_poll_returns_a_head_only_when_it_changed(store: Store):
    trainer = writer(store)
    trainer.acquire(1000)
    found = poll_head(store, "demo", SIGNER.public_key, "")
    assert found is not None
    assert poll_head(store, "demo", SIGNER.public_key, found[1]) is None
    trainer.swap(1000, version=0)
    later = poll_head(store, "demo", SIGNER.public_key, found[1])
    assert later is not None
    assert later[0].version == 0


def test_head_of_another_key_torn_or_of_another_run_is_refused(store: Store):
    writer(store).acquire(1000)
    with pytest.raises(SignatureError):
        read_head(store, "demo", Signer.generate().public_key)
    good = store.get(keys.head("demo"), max_bytes=4096)
    for data in (good.data[:-10], b"[]", b"", good.data.replace(b'"version":-1', b'"version": -1')):
        etag = store.swap(keys.head("demo"), data, store.get(keys.head("demo"), max_bytes=4096).etag)
        with pytest.raises(FormatError):
            read_head(store, "demo", SIGNER.public_key)
    store.swap(keys.head("demo"), good.data.replace(b'"step":0', b'"step":9'), etag)
    with pytest.raises(SignatureError):
        read_head(store, "demo", SIGNER.public_key)
    store.create(keys.head("other"), good.data)
    with pytest.raises(FormatError, match="run demo"):
        read_head(store, "other", SIGNER.public_key)


@pytest.mark.parametrize("data", [b"garbage", b"{}", b""])
def test_overwritten_head_says_what_to_do(store: Store, data: bytes):
    writer(store).acquire(1000)
    store.delete([keys.head("demo")])
    store.create(keys.head("demo"), data)
    with pytest.raises((FormatError, SignatureError), match="HEAD of run demo is not one") as caught:
        writer(store).acquire(2000)
    assert "older versions" in caught.value.hint


def test_swap_that_lost_waits_before_its_next_try_too(store: Store):
    tried_at: list[float] = []

    class Late(Store):
        def swap(self, key: str, data: bytes, etag: str | None) -> str:
            tried_at.append(time.monotonic())
            if len(tried_at) == 2:
                raise PreconditionError("changed since it was read")
            return super().swap(key, data, etag)

    trainer = writer(Late(store.settings, CREDENTIALS), interval_seconds=0.2)
    trainer.acquire(1000)
    trainer.swap(1000, version=0)
    assert all(later - earlier >= 0.2 for earlier, later in itertools.pairwise(tried_at))
    assert len(tried_at) == 3
