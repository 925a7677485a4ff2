"""Checks of this machine and its servers before a run or a join: each passes, warns or fails, and says how to mend it."""
