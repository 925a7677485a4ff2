"""Downloads over a real server and a link that breaks: whole files or typed errors, never half a file under a good name."""

import hashlib
import random

import pytest

from stoa.bucket import download
from stoa.bucket.store import Store
from stoa.contracts.errors import DigestError, ObjectMissingError
from tests.servers import CREDENTIALS
from tests.unit.bucket.flaky import flaky_proxy

DATA = random.Random(1).randbytes(3 * download.RANGE_BYTES + 12345)
SHA256 = hashlib.sha256(DATA).hexdigest()


def test_object_of_several_ranges_arrives_whole_over_a_link_that_breaks(store: Store, tmp_path):
    store.create("k/big", DATA)
    with flaky_proxy(store.settings.endpoint) as proxy:
        flaky = Store(store.settings.model_copy(update={"endpoint": proxy.endpoint}), CREDENTIALS, patience_seconds=30)
        proxy.cut_after_bytes, proxy.num_cuts = 3_000_000, 6
        assert download.fetch(flaky, "k/big", tmp_path / "sub" / "big", num_bytes=len(DATA), sha256=SHA256) == len(DATA)
        assert proxy.num_cuts == 0
        assert proxy.bytes_down < 1.1 * len(DATA)
    assert (tmp_path / "sub" / "big").read_bytes() == DATA
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["big"]


def test_right_file_is_not_downloaded_again_and_a_wrong_one_is_replaced(store: Store, tmp_path):
    data = b"a small delta"
    sha256 = hashlib.sha256(data).hexdigest()
    store.create("k/d", data)
    path = tmp_path / "d"
    for present, expected in ((None, len(data)), (data, 0), (b"another delta", len(data)), (b"", len(data))):
        if present is not None:
            path.write_bytes(present)
        assert download.fetch(store, "k/d", path, num_bytes=len(data), sha256=sha256) == expected
        assert path.read_bytes() == data


def test_object_with_other_bytes_leaves_no_file(store: Store, tmp_path):
    store.create("k/d", b"tampered bytes")
    for num_bytes in (14, 99):
        with pytest.raises(DigestError):
            download.fetch(store, "k/d", tmp_path / "d", num_bytes=num_bytes, sha256="0" * 64)
        assert not (tmp_path / "d").exists()
    with pytest.raises(ObjectMissingError):
        download.fetch(store, "k/none", tmp_path / "d", num_bytes=5, sha256=SHA256)
