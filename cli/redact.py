"""Takes secrets out of text that leaves this machine: values that are known here, and whatever has the form of one. Pure."""

import base64
import json
import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

REMOVED: Final = "<removed>"
SHORTEST: Final = 8
"""A known value shorter than this stands in too many innocent words."""
_WORDS: Final = (
    r"secret|passw(?:or)?d|passwd|token|api[_-]?key|access[_-]?key(?:[_-]?id)?|signing[_-]?key|private[_-]?key|credentials?|session"
)
_FORMS: Final = tuple(
    re.compile(pattern, re.IGNORECASE | re.DOTALL)
    for pattern in (
        r"-----BEGIN [A-Z ]*(?:PRIVATE KEY|CERTIFICATE)-----.*?(?:-----END [A-Z ]*-----|\Z)",
        r"stoa1\.[A-Za-z0-9_.=+/-]{8,}",
        r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
        r"\b(?:hf|ghp|gho|glpat|sk|xox[bp])[_-][A-Za-z0-9_-]{16,}",
        r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*",
    )
)
_NAMED: Final = (
    re.compile(r"(X-Amz-(?:Signature|Credential|Security-Token)(?:=|%3D))[^&\s\"'\\]+", re.IGNORECASE),
    re.compile(r"(authorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|aws4-hmac-sha256)\s+)?)[^\"'\r\n]+", re.IGNORECASE),
    re.compile(rf"((?:{_WORDS})[\w.-]{{0,40}}\\?[\"']?\s*[:=]\s*\\?[\"'])((?:[^\"'\\]|\\.)+)", re.IGNORECASE),
    re.compile(rf"((?:\b|_)(?:{_WORDS})(?:_id)?\s*=\s*)[^\s\"'&,;}}]+", re.IGNORECASE),
    re.compile(r"(://[^/\s:@]*:)[^/\s@]+(?=@)"),
)


class Redactor:
    """Removes known values in every spelling, and what looks like a secret."""

    def __init__(self, known: Iterable[str]) -> None:
        """Values shorter than `SHORTEST` are left out."""
        spellings = {spelling for value in known if len(value.strip()) >= SHORTEST for spelling in _spellings(value.strip())}
        # The longest first: one may be a part of another.
        self._known = sorted(spellings, key=lambda value: (-len(value), value))

    def clean(self, text: str) -> str:
        """`text` without secrets."""
        for value in self._known:
            text = text.replace(value, REMOVED)
        for form in _FORMS:
            text = form.sub(REMOVED, text)
        for named in _NAMED:
            text = named.sub(rf"\g<1>{REMOVED}", text)
        return text


def _spellings(value: str) -> set[str]:
    """As it is, in JSON, in a URL, and in base64."""
    encoded = base64.b64encode(value.encode()).decode()
    return {value, json.dumps(value)[1:-1], quote(value, safe=""), encoded, encoded.rstrip("=")}
