"""What a model keeps for each sequence, and the engine's blocks that this comes to.

The way: `config` (config.json -> layers), `pages` (layers -> bytes), `groups` (layers -> the engine's
block tables), `layout` (prompt and cap -> blocks). Pure: dictionaries and numbers in, records out.
"""

from __future__ import annotations

from kvgate.core.geometry.config import from_config
from kvgate.core.geometry.groups import Group
from kvgate.core.geometry.layers import Kind, Layer, ModelGeometry, State, UnknownGeometry
from kvgate.core.geometry.layout import Blocks, KVLayout, layout_for
from kvgate.core.geometry.pages import KV_DTYPES, Footprint, footprint
from kvgate.core.geometry.serving import Serving

__all__ = [
    "KV_DTYPES",
    "Blocks",
    "Footprint",
    "Group",
    "KVLayout",
    "Kind",
    "Layer",
    "ModelGeometry",
    "Serving",
    "State",
    "UnknownGeometry",
    "footprint",
    "from_config",
    "layout_for",
]
