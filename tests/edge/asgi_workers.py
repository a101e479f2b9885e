"""A configuration of hypercorn with a number of workers that no command line shows."""

workers = 2
