"""The view of a run while it goes on: one changing block on a terminal, plain lines in a pipe."""
