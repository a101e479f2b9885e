"""The part that decides: pricing, the ledger, the line, the forecast, the gate.

Nothing in this package can wait. It has no I/O, clock, randomness, threads or async, and imports
only the standard library: time and chance are arguments. That is what makes it testable by
properties and replayable from a seed.
"""
