"""Names for the strings and counts that cross rooms, so that a host cannot be passed where a run is meant.

Nothing here computes; checks on the form of a name live beside the code that accepts it from outside.
"""

import re
from typing import Final, NewType

RunName = NewType("RunName", str)
HostName = NewType("HostName", str)
QuestionId = NewType("QuestionId", str)
StateId = NewType("StateId", str)
"""sha256 (hex) of the table of tensor digests: names exact weights."""
Key = NewType("Key", str)
"""Key of an object in the bucket."""
Version = NewType("Version", int)
Step = NewType("Step", int)
Token = NewType("Token", int)
"""Fencing token of a trainer lease: lease number * 1000 + attempt. Also called epoch in the bucket."""

NAME_PATTERN: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,47}")
"""Form of run and host names: they stand in object keys, queue names and workflow ids."""


def is_name(text: str) -> bool:
    """True if `text` may be a run or host name: lower case letters, digits and dashes, 1 to 48 of them."""
    return NAME_PATTERN.fullmatch(text) is not None
