"""Names that scripts written for Transformer Engine import from its ``common`` package."""

from . import recipe

__all__ = ["recipe"]
