"""Who calls: checks the pass that every call carries. A pass that was checked is remembered until it ends."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from cli.proxying.refusal import Code, RefusedError
from stoa.bucket.invite import Pass, check_time, read_pass
from stoa.contracts.errors import InviteError

MAX_REMEMBERED: Final = 20_000
_SCHEME: Final = "bearer "

RevokedReason = Callable[[str, str], "str | None"]
"""Host and invite -> why they were revoked, None if they were not."""


class Passes:
    """The passes of one run. For one event loop."""

    def __init__(self, run: str, public_key: str, revoked: RevokedReason, clock: Callable[[], float] = time.time) -> None:
        self._run, self._public_key, self._revoked, self._clock = run, public_key, revoked, clock
        self._checked: OrderedDict[str, Pass] = OrderedDict()

    def known(self, metadata: Iterable[tuple[str, str | bytes]]) -> Pass | None:
        """Whose call this is, if its pass was checked before. Raises RefusedError for one that is no longer good."""
        found = self._checked.get(_shown(metadata))
        return None if found is None else self._still_good(found)

    def check(self, metadata: Iterable[tuple[str, str | bytes]]) -> Pass:
        """Whose call this is. Raises RefusedError: UNAUTHENTICATED without a good pass, PERMISSION_DENIED for a revoked one."""
        text = _shown(metadata)
        if not text:
            raise RefusedError(Code.UNAUTHENTICATED, "no pass: join with the token of `stoa invite`")
        try:
            found = read_pass(text, self._public_key, self._run, now=self._clock())
        except InviteError as error:
            raise RefusedError(Code.UNAUTHENTICATED, f"{error.message} ({error.hint})") from None
        self._checked[text] = found
        if len(self._checked) > MAX_REMEMBERED:
            self._checked.popitem(last=False)
        return self._still_good(found)

    def _still_good(self, found: Pass) -> Pass:
        try:
            check_time(found.issued_at, found.expires_at, f"the invitation {found.invite}", self._clock())
        except InviteError as error:
            raise RefusedError(Code.UNAUTHENTICATED, f"{error.message} ({error.hint})") from None
        if (reason := self._revoked(found.host, found.invite)) is not None:
            raise RefusedError(Code.PERMISSION_DENIED, reason)
        return found


def _shown(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The pass that a call shows; "" for none, or for more than one."""
    shown = [value for name, value in metadata if name == "authorization"]
    if len(shown) != 1 or not isinstance(shown[0], str) or not shown[0].lower().startswith(_SCHEME):
        return ""
    return shown[0][len(_SCHEME) :].strip()
