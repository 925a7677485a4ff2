"""The payload codec: tickets for uploads cross Temporal sealed with a key of their Mac's invite, all else in clear.

AES-256-GCM with a random nonce; the invite's id is authenticated with it, so that a sealed text cannot be handed to
another Mac. The control process seals and never opens: workflows see, keep and pass on sealed texts only. A Mac opens its
own. Payloads may come from strangers, so nothing in them makes the codec fail.
"""

import base64
import binascii
import os
from collections.abc import Callable, Sequence
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from temporalio.api.common.v1 import Payload
from temporalio.converter import PayloadCodec

from stoa.contracts.sealed import SEALED, TICKET, mentions, parts_of, replace_texts

KeyOf = Callable[[str], "bytes | None"]
"""32 secret bytes of an invite; None if this process has not got them."""
_NONCE_BYTES: Final = 12


class TicketCodec(PayloadCodec):
    """Seals what begins with `put1:` in JSON payloads on the way out; with `opens`, opens it again on the way in."""

    def __init__(self, key_of: KeyOf, *, opens: bool) -> None:
        self._key_of, self._opens = key_of, opens

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Payloads with their tickets sealed."""
        return [_replaced(payload, TICKET, lambda text: seal(text, self._key_of)) for payload in payloads]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Payloads with the tickets open that this process may open."""
        if not self._opens:
            return list(payloads)
        return [_replaced(payload, SEALED, lambda text: unseal(text, self._key_of)) for payload in payloads]


def seal(text: str, key_of: KeyOf) -> str:
    """Tickets sealed with the key of their invite, or struck out if there is none. Text that is no ticket stays as it is."""
    found = parts_of(text, TICKET)
    if found is None:
        return text
    invite, encoded = found
    key = key_of(invite)
    if key is None:
        return f"{SEALED}{invite}:"
    nonce = os.urandom(_NONCE_BYTES)
    sealed = nonce + AESGCM(key).encrypt(nonce, base64.urlsafe_b64decode(encoded), invite.encode())
    return f"{SEALED}{invite}:{base64.urlsafe_b64encode(sealed).decode('ascii')}"


def unseal(text: str, key_of: KeyOf) -> str:
    """Tickets opened; as they are without the key, or if they were tampered with."""
    found = parts_of(text, SEALED)
    key = key_of(found[0]) if found is not None else None
    if found is None or key is None:
        return text
    invite, encoded = found
    try:
        sealed = base64.urlsafe_b64decode(encoded)
        opened = AESGCM(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], invite.encode())
    except (ValueError, binascii.Error, InvalidTag):
        return text
    return f"{TICKET}{invite}:{base64.urlsafe_b64encode(opened).decode('ascii')}"


def _replaced(payload: Payload, mark: str, replace: Callable[[str], str]) -> Payload:
    if not mentions(payload.data, mark):
        return payload
    return Payload(metadata=payload.metadata, data=replace_texts(payload.data, mark, replace))
