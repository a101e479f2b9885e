"""Bytes to records and back. Still no I/O: every function here takes bytes and returns values."""
