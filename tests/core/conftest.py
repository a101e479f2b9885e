"""Hypothesis draws the same examples on every run, and new ones when KVGATE_SEED is set.

No deadline for one example: on a busy machine it would test the machine.
"""

import os

from hypothesis import settings

settings.register_profile(
    "kvgate", deadline=None, derandomize="KVGATE_SEED" not in os.environ, print_blob=True
)
settings.load_profile("kvgate")
