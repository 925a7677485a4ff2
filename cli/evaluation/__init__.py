"""What `stoa eval` does: asks a run for an examination, examines a checkpoint, shows and compares results."""
