"""Whether the path of a request runs as C (`KVGATE_COMPILED=1 pip install kvgate`) or as Python.

Both are made from the same sources. What is compiled is listed in `tools/compile.py`.
"""

from __future__ import annotations

from kvgate.core import gate

is_compiled: bool = not str(gate.__file__).endswith(".py")
"""True where this process runs the compiled modules."""
