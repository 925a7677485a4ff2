"""The journal never claims a byte that was not written, whatever was going on when the process died."""

import hashlib
import json
import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoa.bucket.transfer import Piece, Transfer, Wanted, journal_of, part_of, put

SIZE = 40_000
DATA = random.Random(9).randbytes(SIZE)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 15_000)),
        st.tuples(st.just("write"), st.integers(1, 6_000)),
        st.tuples(st.just("leave"), st.just(0)),
        st.tuples(st.just("rob"), st.just(0)),
    ),
    max_size=40,
)


def write(transfer: Transfer, piece: Piece, num_bytes: int, *, robbed: bool = False) -> bool:
    """A thread's next bytes; `robbed`: the piece is taken away while they are written."""
    handle, wanted = transfer.handle(), DATA[piece.at : min(piece.end, piece.at + num_bytes)]
    put(handle, wanted, piece.at)
    os.close(handle)
    if robbed and piece in transfer.pieces:
        transfer.take_over(piece, 2.0)
    return bool(wanted) and transfer.advance(piece, len(wanted), 1.0)


def work(transfer: Transfer, actions: list[tuple[str, int]], chance: random.Random) -> None:
    """Threads at work: taking pieces, writing, leaving, robbing each other; robbed ones write on."""
    flying: list[Piece] = []
    for what, amount in actions:
        if what == "take" and transfer.missing:
            flying.append(transfer.take(amount, 0.0))
        elif flying:
            piece = chance.choice(flying)
            if what == "write":
                before, robbed = piece.at, chance.random() < 0.2
                assert not write(transfer, piece, amount, robbed=robbed) or piece.at > before
            elif what == "leave":
                transfer.leave(piece)
                flying.remove(piece)
            elif piece in transfer.pieces:
                flying.append(transfer.take_over(piece, 2.0))


@settings(deadline=None, max_examples=60)
@given(st.lists(ACTIONS, min_size=1, max_size=4), st.integers(0, 2**32), st.integers(0, 40))
def test_journal_claims_only_what_was_written_also_when_it_is_cut_off(rounds, seed, cut):
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        wanted = Wanted("k", Path(folder) / "file", SIZE, hashlib.sha256(DATA).hexdigest())
        for actions in rounds:
            transfer = Transfer.resume(wanted)
            transfer.open()
            assert transfer.agree("etag")
            claimed = SIZE - transfer.num_missing
            held = part_of(wanted.path).read_bytes()
            spans = _held(transfer)
            assert all(held[start:end] == DATA[start:end] for start, end in spans)
            assert claimed == sum(end - start for start, end in spans)
            work(transfer, actions, chance)
            os.close(transfer._file)  # killed: nothing is noted any more
            os.close(transfer._journal)
            journal = journal_of(wanted.path)
            text = journal.read_bytes()
            journal.write_bytes(text[: len(text) - min(cut, len(text) // 3)])


def test_whole_file_is_named_only_with_its_sha256(tmp_path):
    for right in (True, False):
        wanted = Wanted("k", tmp_path / "file", SIZE, hashlib.sha256(DATA if right else b"").hexdigest())
        transfer = Transfer.resume(wanted)
        transfer.open()
        transfer.agree("etag")
        while transfer.missing:
            piece = transfer.take(7000, 0.0)
            assert write(transfer, piece, 9999)
            assert piece.at == piece.end
            transfer.leave(piece)
            transfer.hash_on(transfer.whole_prefix)
        assert transfer.is_whole
        assert transfer.finish() == right
        transfer.close()
        assert [path.name for path in tmp_path.iterdir()] == (["file"] if right else [])
        (tmp_path / "file").unlink(missing_ok=True)


def _held(transfer: Transfer) -> list[tuple[int, int]]:
    """The byte ranges that are not missing."""
    ends = [0, *(edge for span in transfer.missing for edge in span), SIZE]
    return [(start, end) for start, end in zip(ends[::2], ends[1::2], strict=True) if start < end]


def test_first_answer_fixes_which_object_the_bytes_are_of_also_for_the_next_process(tmp_path: Path):
    wanted = Wanted("k", tmp_path / "file", SIZE, hashlib.sha256(DATA).hexdigest())
    for known in (False, True):
        transfer = Transfer.resume(wanted)
        transfer.open()
        assert transfer.etag == ('"a"' if known else "")
        assert transfer.agree('"a"')
        assert not transfer.agree('"b"')
        transfer.close()


@pytest.mark.parametrize("text", ["", "null", "[" * 100_000, "[1, 2]", "\0" * 64])
def test_journal_that_holds_nonsense_claims_nothing(tmp_path: Path, text: str):
    wanted = Wanted("k", tmp_path / "file", SIZE, hashlib.sha256(DATA).hexdigest())
    part_of(wanted.path).write_bytes(DATA)
    journal_of(wanted.path).write_text(text)
    assert Transfer.resume(wanted).missing == [(0, SIZE)]


@pytest.mark.parametrize("line", ["0 " + "9" * 5000, "7", "9 8", f"0 {SIZE + 1}", "-1 5", "\0\0 \0"])
def test_line_of_a_journal_that_holds_nonsense_claims_nothing(tmp_path: Path, line: str):
    wanted = Wanted("k", tmp_path / "file", SIZE, hashlib.sha256(DATA).hexdigest())
    part_of(wanted.path).write_bytes(DATA)
    journal_of(wanted.path).write_text(json.dumps(["k", SIZE, wanted.sha256, "etag"]) + f"\n{line}\n0 10\n")
    assert Transfer.resume(wanted).missing == [(10, SIZE)]
