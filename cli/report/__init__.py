"""What a run has done, read from its bucket and sessions, and its report: JSON, JSONL, one HTML page and plots."""
