"""CUDA graphs of modules and functions: captured once, forward and backward run as a whole.

``capture`` makes them, ``callables`` is what it makes: callables that run their graphs.
"""

from .capture import make_graphed_callables

__all__ = ["make_graphed_callables"]
