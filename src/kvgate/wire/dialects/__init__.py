"""One file for each API: read the fields that cost, enforce the cap that was reserved."""
