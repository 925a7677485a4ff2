"""Which strings of a message are secrets that cross Temporal sealed, and how they are found: text only, standard library.

    put1:<invite>:<base64url>      tickets for uploads, in clear
    sealed1:<invite>:<base64url>   the same, as history and the UI show them

An invite's id names the key that seals: `<host>.<8 hex digits>`. Everything else of a message stays as it is. The
cipher, and who holds which key, is `activities/codec.py`'s business.
"""

import json
import re
from collections.abc import Callable
from typing import Final, cast

TICKET: Final = "put1:"
SEALED: Final = "sealed1:"
_INVITE: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,47}\.[0-9a-f]{8}")
_CODED: Final = re.compile(r"(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?")


def is_invite(text: str) -> bool:
    """True if `text` has the form of an invite's id."""
    return _INVITE.fullmatch(text) is not None


def host_of(invite: str) -> str:
    """The host that an invite is for."""
    return invite.rpartition(".")[0]


def parts_of(text: str, mark: str) -> tuple[str, str] | None:
    """Invite and base64url part of a text that begins with `mark`; None if it is none of ours."""
    if not text.startswith(mark):
        return None
    invite, colon, coded = text.removeprefix(mark).partition(":")
    return (invite, coded) if colon and is_invite(invite) and _CODED.fullmatch(coded) else None


def mentions(data: bytes, mark: str) -> bool:
    """True if JSON `data` may hold a string that begins with `mark`: the quick look before anything is parsed."""
    return f'"{mark}'.encode() in data


def replace_texts(data: bytes, mark: str, replace: Callable[[str], str]) -> bytes:
    """JSON `data` with every string that begins with `mark` put through `replace`; as it was if it is not JSON."""
    try:
        tree: object = json.loads(data)
        return json.dumps(_walk(tree, mark, replace), separators=(",", ":"), ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # also a lone surrogate, which JSON has and UTF-8 has not
        return data


def _walk(tree: object, mark: str, replace: Callable[[str], str]) -> object:
    if isinstance(tree, str):
        return replace(tree) if tree.startswith(mark) else tree
    if isinstance(tree, list):
        return [_walk(item, mark, replace) for item in cast(list[object], tree)]
    if isinstance(tree, dict):
        return {name: _walk(item, mark, replace) for name, item in cast(dict[str, object], tree).items()}
    return tree
