"""How a process may speak to a Temporal frontend: TLS, client certificate, API key. Standard library only.

Made from settings and environment by `stoa/config/load.py` or from an invitation, used by `activities/connection.py`.
"""

from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class Access:
    """PEM texts as bytes; b"" and "" where there is none. Printing one shows no secret."""

    tls: bool = False
    server_name: str = ""
    """Name that the server's certificate must have, where it is not the host of the address."""
    ca: bytes = b""
    """Certificates that are trusted instead of the system's."""
    certificate: bytes = b""
    private_key: bytes = field(default=b"", repr=False)
    api_key: str = field(default="", repr=False)
    """Sent with each call as `authorization: Bearer ...`."""
    is_invited: bool = False
    """Through the proxy, as an invited Mac: what only the owner's processes may ask is not asked."""


PLAIN: Final = Access()
"""A server on this machine: no TLS, no key."""
