"""The wheel's dependencies: the minor version of torch that it is built with.

Compiled code does not fit another one, so the requirement is read from the torch of the build.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any


def requirement(version: str) -> str:
    """As ``torch>=2.15,<2.16`` for ``2.15.0+cu130``."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return f"torch>={major}.{minor},<{major}.{minor + 1}"


def dynamic_metadata(field: str, settings: Mapping[str, Any] | None = None) -> list[str]:
    if field != "dependencies" or settings:
        raise ValueError(
            f"wanted the field 'dependencies' and no settings, got {field}, {settings}"
        )
    return [requirement(importlib.metadata.version("torch"))]
