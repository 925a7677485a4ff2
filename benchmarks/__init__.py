"""Measurements side by side. Standard output belongs to the numbers: what the parts log goes to standard error."""

import sys

import structlog

structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))  # the stderr of the moment
