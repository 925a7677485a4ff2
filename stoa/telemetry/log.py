"""structlog set-up of every process: events to stderr, data never.

What is logged where is the caller's business; this file decides form only. A terminal gets readable lines, in the words
of whoever sets it up, a file or pipe gets one JSON object a line. Values of secrets are masked by name as a last line of defence.
"""

import logging
import sys
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

import structlog

from stoa.telemetry.kept import KeptEvents

_SECRET_NAMES = ("secret", "token_secret", "password", "signing_key", "authorization", "credential")


def _mask_secrets(_logger: object, _method: str, event: MutableMapping[str, object]) -> MutableMapping[str, object]:
    for name in event:
        if any(part in name.lower() for part in _SECRET_NAMES):
            event[name] = "***"
    return event


class _Kept:
    """Where this process keeps its events, if anywhere."""

    file: KeptEvents | None = None

    @classmethod
    def take(cls, _logger: object, _method: str, event: MutableMapping[str, object]) -> MutableMapping[str, object]:
        if cls.file is not None:
            cls.file.write(event)
        return event


def keep(path: Path | None) -> None:
    """Keep all later events of this process in a file too, as JSON; None: no longer."""
    if _Kept.file is not None:
        _Kept.file.close()
    _Kept.file = KeptEvents(path) if path is not None else None


def _lines(line_of: Callable[[Mapping[str, object]], str]) -> structlog.typing.Processor:
    def render(_logger: object, _method: str, event: MutableMapping[str, object]) -> str:
        line = line_of(event)
        if not line:
            raise structlog.DropEvent
        return line

    return render


def configure(
    *, level: str = "info", json_lines: bool | None = None, line_of: Callable[[Mapping[str, object]], str] | None = None, **bound: object
) -> None:
    """Set up logging for this process, once, and bind fields (run, worker, version) to every event.

    level: a name of the standard library's levels. json_lines: None decides by whether stderr is a terminal. line_of: an
    event's line on a terminal, "" for none.
    """
    keep(None)
    number = logging.getLevelNamesMapping()[level.upper()]
    as_json = not sys.stderr.isatty() if json_lines is None else json_lines
    plain = structlog.dev.ConsoleRenderer(colors=False) if line_of is None else _lines(line_of)
    renderer = structlog.processors.JSONRenderer() if as_json else plain
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _mask_secrets,
            _Kept.take,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # the stderr of the moment: it may be replaced and closed
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=max(number, logging.WARNING), stream=sys.stderr, force=True)
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**bound)


def bind(**fields: object) -> None:
    """Bind more fields to every later event of this context."""
    structlog.contextvars.bind_contextvars(**fields)
