"""Prompt tokens of a request: `counter` chooses the source, the others are the sources."""
