"""One file a command of `stoa`: reads arguments, calls what does the work, says what came of it."""
