"""Draws single operations of a random pipeline, and keeps track of shape, dtype and channels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipeline_case import Op
from pipeline_ops import GUESTS

SIZES = (8, 4, 1, 2, 3, 5, 6, 7, 10, 12, 16, 18, 24, 33)
#: Under a recipe: whole blocks, more than one, and parts of them.
BLOCKS = (32, 16, 8, 20, 33, 48, 64, 130)
ROWS = ((3,), (), (1,), (0,), (5,), (2, 3), (1, 4), (0, 2), (2, 0), (2, 1, 3), (66,))
LAYOUTS = ("contiguous", "transposed", "every second", "offset", "expanded")
PLAIN = ("", "contiguous")
DTYPES = ("float64", "float32", "bfloat16", "float16")

SMOOTH = ("GELU", "SiLU", "QGELU", "SReLU")
GATED = ("SwiGLU", "GLU", "GEGLU", "QGEGLU", "SReGLU", "ReGLU", "ClampedSwiGLU", "SiTUGLU")
SCALED = ("ScaledSwiGLU", "ScaledSReLU", "ScaledClampedQGeGLU", "ScaledSiTUGLU")
#: How fast an operation lets values grow: the degree of its polynomial.
DEGREES = {"SReLU": 2, "ScaledSReLU": 2, "SReGLU": 3, "TimesExtra": 2}
DEGREES |= {name: 2 for name in (*GATED, *SCALED) if name not in DEGREES}
HOOKS = ("forward", "forward_pre", "backward", "backward_pre")
BRANCHES = ("AddExtraInput", "MakeExtraOutput")


class Draw:
    """Draws operations that fit what came before. Smaller draws make plainer operations."""

    def __init__(self, rng: random.Random, recipe: str = "") -> None:
        self.rng = rng
        self.recipe = recipe
        self.sizes = BLOCKS if recipe else SIZES
        self.tied: dict[int, tuple[Op, tuple[int, ...], str]] = {}
        self.channels = 0

    # -- draws

    def chance(self, percent: int) -> bool:
        return self.rng.randrange(100) >= 100 - percent

    def pick(self, items: Sequence[Any]) -> Any:
        return items[self.rng.randrange(len(items))]

    def some(self, items: Sequence[Any], percent: int) -> tuple[Any, ...]:
        return tuple(item for item in items if self.chance(percent))

    # -- operations

    def op(self, kind: str, options: dict[str, Any] | None = None, **given: Any) -> Op:
        """Adds what any operation may have."""
        options = options or {}
        op = Op(kind, options, **given)
        if "dtype" in options and not kind.startswith("torch."):
            names = ("scale",) if kind == "ClassicScale" else ("weight", "bias")
            op = replace(op, frozen=self.some(names, 25) if self.chance(50) else ())
        if self.hooked and self.chance(30):
            hooks = HOOKS if not options.get("in_place") else HOOKS[:2]
            op = replace(op, hooks=self.some(hooks, 40))
        self.degree = min(self.degree * DEGREES.get(kind, 1), 9)
        if kind.endswith(("LU", "Linear")) or kind in ("LayerNorm", "RMSNorm"):
            self.dtype = self.cast(self.dtype)
        return op

    def cast(self, dtype: str) -> str:
        return dtype if dtype == "float64" else self.autocast or dtype

    def parameter_dtype(self) -> str:
        return self.pick(self.dtypes)

    def one(self) -> Op:
        wide = self.shape[-1]
        kinds = ["linear", "norm", "smooth", "small", "relu"]
        kinds += ["gated", "gated", "scaled"] if self.degree <= 3 else ["norm", "norm"]
        kinds += ["guest", *["linear"] * (3 if self.recipe else 0)]
        kinds += ["experts"] if not self.recipe else []
        kind = self.pick(kinds)
        if kind == "linear":
            return self.linear()
        if kind == "experts":
            return self.experts()
        if kind == "norm":
            return self.norm()
        if kind in ("gated", "scaled") and (kind == "scaled" or wide % 2 == 0):
            return self.activation(kind)
        if kind == "smooth" and self.degree <= 3:
            return self.op(self.pick(SMOOTH), self.cached())
        if kind == "relu":
            return self.op("ReLU", self.cached())
        if kind == "guest":
            return self.guest()
        return self.small()

    def cached(self) -> dict[str, Any]:
        keeps = self.chance(5 if not self.recipe else 12)
        return {"cache_quantized_input": True} if keeps and self.dtype != "float64" else {}

    def linear(self, out_features: int | None = None, **given: Any) -> Op:
        dtype = self.parameter_dtype()
        options = {
            "in_features": self.shape[-1],
            "out_features": out_features or self.pick(self.sizes),
            "dtype": dtype,
        }
        self.shape = (*self.shape[:-1], options["out_features"])
        self.dtype = dtype
        kind = "Linear" if self.chance(70) else "BasicLinear"
        if kind == "Linear" and self.chance(40):
            options["bias"] = False
        if self.main_grad and self.chance(60):
            options["accumulate_into_main_grad"] = True
        return self.op(kind, options, strided=self.chance(8), **given)

    def experts(self, out_features: int | None = None, groups: int | None = None) -> Op:
        dtype = self.parameter_dtype()
        options: dict[str, Any] = {
            "num_groups": groups or self.pick((3, 1, 2, 5)),
            "in_features": self.shape[-1],
            "out_features": out_features or self.pick(self.sizes),
            "dtype": dtype,
        }
        for name in ("single_grouped_weight", "single_grouped_bias"):
            if self.chance(25):
                options[name] = True
        if self.chance(30):
            options["bias"] = False
        self.shape = (*self.shape[:-1], options["out_features"])
        self.dtype = dtype
        return self.op("GroupedLinear", options)

    def norm(self) -> Op:
        options: dict[str, Any] = {"normalized_shape": self.shape[-1]}
        if len(self.shape) > 1 and self.shape[-2] > 0 and self.chance(15):
            options["normalized_shape"] = self.shape[-2:]
            self.fixed_rows = True
        kind = self.pick(("RMSNorm", "LayerNorm", "L2Normalization"))
        eps = self.pick((None, 1e-3, 0.1))
        self.degree = 1
        if kind == "L2Normalization":
            return self.op(kind, {} if eps is None else {"eps": eps})
        options["dtype"] = self.parameter_dtype()
        if eps is not None:
            options["eps"] = eps
        if self.chance(40):
            options["zero_centered_gamma"] = True
        return self.op(kind, options)

    def activation(self, kind: str) -> Op:
        wide = self.shape[-1]
        names = GATED if kind == "gated" else SCALED if wide % 2 == 0 else ("ScaledSReLU",)
        name = self.pick(names)
        options: dict[str, Any] = self.cached() if kind == "gated" else {}
        if name in ("ClampedSwiGLU", "ScaledClampedQGeGLU"):
            options |= {"limit": self.pick((7.0, 0.5, 1.5)), "alpha": self.pick((1.702, 0.5))}
            options["glu_linear_offset"] = self.pick((1.0, 0.0, -0.5))
        elif name in ("SiTUGLU", "ScaledSiTUGLU"):
            options |= {"beta1": self.pick((4.0, 1.0)), "beta2": self.pick((25.0, 2.0))}
        if name in ("SwiGLU", "ClampedSwiGLU", "SiTUGLU", *SCALED) and name != "ScaledSReLU":
            blocks = [n for n in (1, 2, 3, 4) if wide % (2 * n) == 0]
            if self.chance(30):
                options["glu_interleave_size"] = self.pick(blocks)
        channel = self.take(self.shape[:-1]) if kind == "scaled" else ""
        if name != "ScaledSReLU":
            self.shape = (*self.shape[:-1], wide // 2)
        extra = self.extra() if kind == "scaled" and not channel else PLAIN
        return self.op(name, options, takes=channel, extra=extra)

    def small(self) -> Op:
        kinds = ("ConstantScale", "Bias", "Identity", "Dropout", "Reshape", "Quantize")
        kind = self.pick((*kinds, "AllReduce", "AllGather", "ReduceScatter"))
        if kind == "Quantize":
            return self.quantize()
        if kind == "ConstantScale":
            return self.op(kind, {"scale": self.pick((0.5, -1.5, 1.0, 0.0))})
        if kind == "Bias":
            return self.op(kind, {"size": self.shape[-1], "dtype": self.parameter_dtype()})
        if kind == "Dropout":
            return self.op(kind, {"p": 0.0 if self.training else self.pick((0.0, 0.3))})
        if kind == "Reshape":
            return self.reshape()
        return self.op(kind)

    def quantize(self) -> Op:
        """Hooks would hand what it makes from fuser to fuser, in another format than inside one."""
        if self.hooked and self.recipe:
            return self.op("Identity")
        options = {"backward": True} if self.chance(40) else {}
        return self.op("Quantize", options | ({"forward": False} if self.chance(20) else {}))

    def reshape(self) -> Op:
        wide = self.shape[-1]
        if wide % 2 == 0 and self.chance(30):
            shape: tuple[int, ...] = (-1, 2, wide // 2)
        elif self.chance(30) and all(self.shape):
            shape = (*reversed(self.shape[:-1]), wide)
            self.fixed_rows = True
        else:
            shape = (-1, wide)
        total = 1
        for size in self.shape:
            total *= size
        known = 1
        for size in shape:
            known *= size if size >= 0 else 1
        self.shape = tuple(total // known if size == -1 else size for size in shape)
        # With other rows, channels so far may have other shapes than now.
        self.open = {name: (None, taken) for name, (_, taken) in self.open.items()}
        return self.op("Reshape", {"shape": shape})

    def guest(self) -> Op:
        names = [n for n in GUESTS if n != "TimesExtra" or self.degree <= 3]
        name = self.pick(names)
        if name == "ClassicScale":
            return self.op(name, {"dtype": self.parameter_dtype()})
        if name == "SplitAffine":
            dtype = self.parameter_dtype()
            self.dtype = _wider(self.dtype, dtype)
            return self.op(name, {"size": self.shape[-1], "dtype": dtype})
        if name == "TimesExtra":
            channel = self.take(self.shape)
            return self.op(name, takes=channel, extra=PLAIN if channel else self.extra())
        if name == "RowScales":
            return self.op(name, **self.give(self.shape[:-1]))
        return self.op(name)

    # -- branches

    def extra(self) -> tuple[str, str]:
        dtype = self.pick(self.dtypes) if self.mixed and self.chance(50) else ""
        return dtype, self.pick(LAYOUTS) if self.chance(30) else "contiguous"

    def give(self, shape: tuple[int, ...], sure: bool = False) -> dict[str, Any]:
        """A channel for an extra output, or none."""
        if not sure and self.chance(40):
            return {}
        self.channels += 1
        name = f"c{self.channels}"
        self.open[name] = (shape, False)
        return {"gives": name, "to_caller": self.chance(30)}

    def take(self, shape: tuple[int, ...], sure: bool = False) -> str:
        """An open channel of this shape, or none."""
        names = [name for name, (given, _) in self.open.items() if given == shape]
        if not names or (not sure and self.chance(25)):
            return ""
        name = self.pick(names)
        self.open[name] = (shape, True)
        return name

    def fork(self, sure: bool = False) -> Op:
        options = {"in_place": True} if self.chance(25) else {}
        return self.op("MakeExtraOutput", options, **self.give(self.shape, sure))

    def join(self, sure: bool = False) -> Op:
        channel = self.take(self.shape, sure)
        if channel:
            return self.op("AddExtraInput", takes=channel)
        extra = self.extra()
        if not self.chance(30):
            return self.op("AddExtraInput", extra=extra)
        # Memory that is written to has one place for each value.
        extra = (extra[0], "contiguous" if extra[1] == "expanded" else extra[1])
        self.dtype = extra[0] or self.dtype
        return self.op("AddExtraInput", {"in_place": True}, extra=extra)

    def branch(self) -> Op:
        return self.fork() if self.chance(50) else self.join()


def _wider(a: str, b: str) -> str:
    order = ("float16", "float32", "float64")
    if {a, b} == {"bfloat16", "float16"}:
        return "float32"
    return max(a, b, key=lambda name: order.index(name.replace("bfloat16", "float16")))
