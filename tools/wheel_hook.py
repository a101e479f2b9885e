"""Puts the compiled hot path into the wheel, where `KVGATE_COMPILED=1` asks for it.

    KVGATE_COMPILED=1 pip install .          needs a C compiler

Without it the wheel is plain Python and the same for every platform. Promise: a wheel that was to be
compiled and cannot be is an error, never a slow wheel under a fast name.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# `compile.py` stands beside this file, which the builder reads by its path.
sys.path.insert(0, str(Path(__file__).parent))

# mypy types the sources before it translates them, so it wants to see what they import.
COMPILER = ["mypy>=1.18", "setuptools>=75"]


class CompiledHook(BuildHookInterface[Any]):
    """For the target `wheel`."""

    folder: str | None = None

    @property
    def is_asked(self) -> bool:
        return self.target_name == "wheel" and os.environ.get("KVGATE_COMPILED") == "1"

    def dependencies(self) -> list[str]:
        return [*COMPILER, *self.metadata.core.dependencies] if self.is_asked else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not self.is_asked or version == "editable":
            return
        import compile as compiler

        self.folder = tempfile.mkdtemp(prefix="kvgate-compiled-")
        compiler.compile_into(Path(self.folder) / "made")
        for made in sorted(Path(self.folder).glob("made/**/*.so")):
            build_data["force_include"][str(made)] = str(made.relative_to(Path(self.folder) / "made"))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
