"""Everything that awaits: sockets, the clock, child processes."""
