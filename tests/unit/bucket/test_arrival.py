"""How far a download has come, read from disk: never over its total, never less than before, also after a kill."""

import hashlib
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.proxy import Faults, fault_proxy
from stoa.bucket.download import Downloads
from stoa.bucket.store import Store
from stoa.bucket.transfer import Piece, Transfer, Wanted, put
from stoa.telemetry.arriving import Arrival
from tests.servers import CREDENTIALS

SIZE = 9 << 20
ACTS = st.lists(st.tuples(st.sampled_from(("take", "come", "come", "leave", "take over", "kill")), st.integers(0, 9)), max_size=60)


@settings(deadline=None, max_examples=60)
@given(acts=ACTS)
def test_bytes_told_never_fall_nor_pass_the_total_through_kills(acts: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("arrival") / "part"
    wanted = Wanted("k", path, SIZE, "0" * 64)
    transfer, came, told = Transfer.resume(wanted), set[int](), 0
    transfer.open()
    transfer.agree("etag")
    for act, number in acts:
        pieces: list[Piece] = transfer.pieces
        if act == "kill":  # no method of the old one is called: what it did not write down is lost
            transfer = Transfer.resume(wanted)
            transfer.open()
        elif act == "take" and transfer.missing:
            transfer.take((number + 1) << 19, 0.0)
        elif pieces:
            piece = pieces[number % len(pieces)]
            if act == "come":
                count = min((number + 1) << 17, piece.end - piece.at)
                handle = transfer.handle()
                put(handle, bytes(count), piece.at)
                came |= set(range(piece.at >> 17, (piece.at + count) >> 17))
                transfer.advance(piece, count, 0.0)
            elif act == "leave":
                transfer.leave(piece)
            else:
                transfer.take_over(piece, 0.0)
        assert told <= transfer.kept_bytes <= min(SIZE, len(came) << 17)
        told = transfer.kept_bytes
    transfer.close()
    assert Transfer.resume(wanted).kept_bytes >= told


def test_share_over_a_real_server_goes_on_where_the_last_process_was(store: Store, tmp_path: Path):
    data = random.Random(3).randbytes(6 << 20)
    keys = [f"k/{number}" for number in range(2)]
    for key in keys:
        store.create(key, data)
    wanted = [Wanted(key, tmp_path / key, len(data), hashlib.sha256(data).hexdigest()) for key in keys]
    seen: list[Arrival] = []
    total = 2 * len(data) + 1000
    with fault_proxy(store.settings.endpoint, Faults(link_rate=8e6)) as (_, endpoint):
        far = Store(store.settings.model_copy(update={"endpoint": endpoint}), CREDENTIALS, patience_seconds=30)
        with Downloads(far, wanted, held_bytes=1000) as downloads:
            while not seen or seen[-1].num_bytes < total // 2:
                seen.append(downloads.arrival)
                time.sleep(0.01)
    left = [one for one in wanted if not one.path.exists()]
    with Downloads(store, left, held_bytes=total - sum(one.num_bytes for one in left)) as downloads:
        seen.append(downloads.arrival)
        for one in left:
            downloads.wait(one.key)
            seen.append(downloads.arrival)
    told = [one.num_bytes for one in seen]
    assert told[0] >= 1000 and told == sorted(told)
    assert {one.total_bytes for one in seen} == {total}
    assert (seen[-1].num_bytes, seen[-1].percent) == (total, 100)
