"""The only place that reads time or draws a random number."""

from __future__ import annotations

import random
import time

now = time.monotonic
"""Seconds on the process's monotonic clock."""

draw = random.random
"""A number in [0, 1)."""
