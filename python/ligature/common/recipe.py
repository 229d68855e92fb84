"""The recipes, under the name that scripts written for Transformer Engine import."""

from ..quantization import recipe as _recipes
from ..quantization.recipe import *  # noqa: F403
from ..quantization.roles import QuantizerRole

__all__ = ["QuantizerRole"]
__all__ += _recipes.__all__
