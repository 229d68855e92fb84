"""Makes random pipelines: ``random_case(rng)``, or ``cases`` as a hypothesis strategy.

One generator serves both: it draws from a ``random.Random``, which is seeded in a soak and is
hypothesis' own in a test, where a failing case shrinks. Smaller draws make plainer cases.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st
from pipeline_case import Call, Case, Fuse, Nest, Op, every_op
from pipeline_draw import BRANCHES, DTYPES, HOOKS, LAYOUTS, ROWS, SCALED, SMOOTH, Draw
from pipeline_ops import GUESTS, LINEAR_SILU
from quantized_reference import RECIPES


class _Maker(Draw):
    """Draws a whole case."""

    # -- the whole

    def case(self) -> Case:
        wide = ("float32",) * 5 if self.recipe else ("float64",) * 4 + ("float32",) * 3
        base = self.pick((*wide, *("bfloat16",) * 2, "float16"))
        self.mixed = self.chance(25)
        self.dtypes = (DTYPES[1:] if self.recipe else DTYPES) if self.mixed else (base,)
        autocast = self.pick(("bfloat16", "float16")) if self.chance(15) else ""
        self.autocast = autocast
        rows, features = self.pick(ROWS), self.pick(self.sizes)
        self.shape = (*rows, features)
        self.dtype = base
        self.training = not self.chance(20)
        self.main_grad = self.chance(8)
        self.hooked = self.chance(25)
        self.fixed_rows = False
        self.needs_rows = False  # an operation takes no vector
        self.degree = 1
        ops = self.ops(self.pick((2, 1, 3, 4, 5, 6, 7, 8, 9, 10)), depth=0)
        flat = all(isinstance(op, Op) and "torch." not in op.kind for op in ops)
        calls = self.calls((*rows, features))
        return Case(
            ops=ops,
            calls=calls,
            dtype=base,
            autocast=autocast,
            recipe=self.recipe,
            recompute="cheap" if self.chance(40) else "none",
            training=self.training,
            fuser=flat and not any(op.hooks for op in ops) and self.chance(20),
            copied=self.chance(10),
            late=self.chance(20) and not self.main_grad,
            fusions=self.fusions(ops, len(calls)),
        )

    def calls(self, shape: tuple[int, ...]) -> tuple[Call, ...]:
        calls = []
        for k in range(1 + self.chance(30) + self.chance(10)):
            if k and not self.fixed_rows and self.chance(50):
                shape = (*self.pick(ROWS), shape[-1])
                shape = (1, *shape) if len(shape) == 1 and self.needs_rows else shape
            grads = ("leaf", "computed", "none")
            calls.append(
                Call(
                    seed=self.rng.randrange(2**20),
                    shape=shape,
                    layout=self.pick(LAYOUTS) if self.chance(40) else "contiguous",
                    grad=self.pick(grads),
                    extra_grads=tuple(self.pick(grads) for _ in range(2)),
                    frozen=self.pick(("as said",) * 6 + ("none", "all")),
                    mode=self.pick(("grad",) * 10 + ("no_grad", "inference")),
                    unused=self.some(range(4), 15),
                    backward=self.pick(("once",) * 4 + ("twice", "some")),
                    grad_layout=self.pick(LAYOUTS) if self.chance(30) else "contiguous",
                )
            )
        if self.main_grad or self.recipe:
            calls = [replace(c, backward=c.backward.replace("some", "once")) for c in calls]
        if self.recipe:
            # Zeros that flow into a part would draw random numbers there.
            calls = [replace(c, unused=()) for c in calls]
        return tuple(calls)

    # -- operations

    def ops(self, count: int, depth: int) -> tuple[Any, ...]:
        """A list of modules; a run of neighbouring operations may share channels."""
        self.open: dict[str, tuple[tuple[int, ...] | None, bool]] = {}
        out: list[Any] = []
        while len(out) < count:
            draw = self.rng.randrange(100)
            if draw < 55:
                out.append(self.one())
            elif draw < 78:
                out.extend(self.motif())
            elif draw < 84:
                out.append(self.branch())
            elif draw < 89:
                out.append(self.again())
            elif draw < 95 or depth > 1:
                self.close(out)
                out.append(self.torch_module())
            else:
                self.close(out)
                out.append(self.nest(depth))
                self.open = {}
        self.close(out)
        return tuple(out)

    def close(self, out: list[Any]) -> None:
        """What nobody took from its channel is the caller's."""
        for at, op in enumerate(out):
            if isinstance(op, Op) and op.gives in self.open and not self.open[op.gives][1]:
                out[at] = replace(op, to_caller=True)
        self.open = {}

    # -- several at once

    def motif(self) -> list[Op]:
        """Neighbours that built-in fusions look for."""
        kinds = ("linear act", "bias act", "linear add", "fork linear", "fork norm", "mlp", "mlp")
        kinds += ("residual", "residual", "scales", "twice", "linear silu")
        kinds += ("experts", "mixture") if not self.recipe else ()
        kind = self.pick(kinds)
        if kind == "experts":
            return self.experts_block()
        if kind == "mixture":
            return self.mixture() if len(self.shape) > 1 else self.experts_block()
        if kind == "residual":
            return self.residual()
        if kind == "scales":
            scales = self.op("RowScales", **self.give(self.shape[:-1], sure=True))
            return [scales, self.linear(self.pick((8, 12, 6))), self.activation("scaled")]
        if kind == "twice":
            op = self.again()
            between = self.op("Identity")
            return [op, between, *([self.again()] if self.chance(80) else [])]
        if kind == "mlp":
            return self.mlp()
        if kind == "linear silu":
            linear = self.linear()
            if linear.kind == "Linear":
                linear = replace(linear, options={**linear.options, "bias": False})
            return [linear, self.op("SiLU")]
        if kind == "linear add":
            scale = [self.op("ConstantScale", {"scale": -0.5})] if self.chance(50) else []
            linear = self.linear()
            if scale and linear.kind == "Linear":
                linear = replace(linear, options={**linear.options, "bias": False})
            return [linear, *scale, self.join()]
        if kind == "linear act":
            return [self.linear(self.pick((8, 12, 6))), self.activation("gated")]
        if kind == "bias act":
            return [
                self.op("Bias", {"size": self.shape[-1], "dtype": self.parameter_dtype()}),
                self.op(self.pick((*SMOOTH, "ReLU"))),
            ]
        fork = self.fork()
        return [fork, self.linear() if kind == "fork linear" else self.norm()]

    def mlp(self) -> list[Op]:
        wide, rows = self.shape[-1], self.shape[:-1]
        before, after = self.chance(40), self.chance(30)
        out = [self.fork()] if before else []
        norm = self.norm()
        out.append(norm)
        out += [self.fork()] if after else []
        out.append(self.linear(self.pick((8, 12, 16))))
        if self.chance(50):
            out.append(self.activation("gated"))
        else:
            out.append(self.op(self.pick((*SMOOTH, "ReLU"))))
        out.append(self.linear(wide))
        assert self.shape == (*rows, wide)
        return [*out, *([self.join()] if before or after else [])]

    def experts_block(self) -> list[Op]:
        groups = self.pick((2, 1, 3))
        norm, first = self.norm(), self.experts(self.pick((8, 12, 16)), groups)
        act = self.activation(self.pick(("gated", "scaled")))
        return [norm, first, act, self.experts(groups=groups)]

    def mixture(self) -> list[Op]:
        """Experts with the routing around them, on channels of their own."""
        self.needs_rows = True
        norm = self.norm()
        rows, wide = self.shape[:-1], self.shape[-1]
        experts, top_k = self.pick((3, 1, 4)), self.pick((2, 1, 3))
        self.channels += 1
        name = f"c{self.channels}"
        options = {"num_experts": experts, "top_k": top_k}
        dispatch = self.op("Dispatch", options, gives=name, to_caller=False, extra=self.extra())
        self.shape = (math.prod(rows) * top_k, wide)
        first = self.experts(self.pick((8, 12, 16)), experts)
        act = self.op("ScaledSwiGLU", takes=f"{name}.rows")
        self.shape = (self.shape[0], self.shape[1] // 2)
        second = self.experts(groups=experts)
        self.shape = (*rows, self.shape[-1])
        combine = self.op("Combine", takes=f"{name}.map")
        linears = [replace(op, takes=f"{name}.splits") for op in (first, second)]
        return [norm, dispatch, linears[0], act, linears[1], combine]

    def residual(self) -> list[Op]:
        """A branch that is taken up later, sometimes more than once."""
        wide = self.shape[-1]
        out = [self.fork(sure=True)]
        for _ in range(1 + self.chance(30)):
            for _ in range(self.pick((1, 2, 0, 3))):
                kind = self.pick(("linear", "norm", "act", "scale"))
                if kind == "linear":
                    out.append(self.linear(wide))
                elif kind == "norm":
                    out.append(self.norm())
                elif kind == "act":
                    out.append(self.op(self.pick(("GELU", "SiLU", "ReLU"))))
                else:
                    out.append(self.op("ConstantScale", {"scale": 0.5}))
            out.append(self.join(sure=True))
        return out

    def again(self) -> Op:
        """An operation used before that fits, or a new one that may be used again."""
        fitting = [n for n, (_, shape, dtype) in self.tied.items() if shape == self.shape[-1:]]
        if fitting and self.chance(70):
            op, _, dtype = self.tied[self.pick(fitting)]
            self.dtype = self.cast(self.dtype) if dtype == "cast" else dtype or self.dtype
            return op
        number = len(self.tied) + 1
        kind = self.pick(("linear", "smooth", "join", "scale"))
        if kind == "linear":
            op = self.linear(self.shape[-1])
        elif kind == "smooth":
            op = self.op(self.pick(("GELU", "SiLU")))
        elif kind == "join":
            op = self.op("AddExtraInput")
        else:
            op = self.op("ConstantScale", {"scale": 0.75})
        op = replace(op, tied=number)
        fixed = {"linear": self.dtype, "smooth": "cast"}.get(kind, "")
        self.tied[number] = (op, self.shape[-1:], fixed)
        return op

    def torch_module(self) -> Op:
        kind = self.pick(("torch.Linear", "torch.Softsign", "torch.Identity", "torch.Dropout"))
        if kind == "torch.Linear":
            size = self.pick(self.sizes)
            options = {"in_features": self.shape[-1], "out_features": size, "dtype": self.dtype}
            self.shape = (*self.shape[:-1], size)
            return self.op(kind, options)
        if kind == "torch.Softsign":
            self.degree = 1
        return self.op(kind, {"p": 0.0} if kind == "torch.Dropout" else {})

    def nest(self, depth: int) -> Nest:
        ops = self.ops(self.pick((2, 1, 3)), depth + 1)
        plain = not any(
            op.kind in (*BRANCHES, "RowScales", "TimesExtra", "GroupedLinear", "Dispatch", *SCALED)
            for op in every_op(ops)
        )
        # A backward hook hands views in that may not be written to.
        written = any(op.options.get("in_place") and op.kind == BRANCHES[0] for op in every_op(ops))
        hooks = HOOKS[:2] if written else HOOKS
        return Nest(
            "torch" if plain and self.chance(30) else "ligature",
            ops,
            recompute="cheap" if self.chance(30) else "none",
            hooks=self.some(hooks, 20) if self.hooked else (),
        )

    # -- fusions

    def fusions(self, ops: tuple[Any, ...], calls: int) -> tuple[Fuse, ...]:
        """Of neighbours that there are, so that they fire."""
        if not self.chance(35):
            return ()
        out = []
        names = _basic_names(ops)
        for _ in range(1 + self.chance(40)):
            size = self.pick((2, 3, 1))
            if len(names) < size:
                continue
            at = self.rng.randrange(len(names) - size + 1)
            pattern = tuple(names[at : at + size])
            if {"Dispatch", "Combine"} & set(pattern):
                continue
            by_hand = ("BasicLinear", "SiLU")
            if by_hand in pairwise(names) and self.chance(60):
                pattern = by_hand
            kind = self.pick(("forward", "backward", "joint"))
            form = self.pick(("declarative", "function"))
            if form == "declarative" and pattern[:2] == ("BasicLinear", "Bias") and self.chance(50):
                pattern = ("Linear", *pattern[2:])
            style = "Pieces"
            halves = not set(pattern) & {"Linear", "GroupedLinear", *GUESTS, *BRANCHES, *SCALED}
            if kind == "forward" and halves and self.chance(40):
                style = "SplitPieces"
            plain = not (self.mixed or self.autocast or (self.main_grad and kind != "forward"))
            plain = plain and not self.recipe  # those by hand compute in high precision
            # and save what an activation takes as it is.
            plain = plain and not any(o.options.get("cache_quantized_input") for o in every_op(ops))
            if pattern == by_hand and plain:
                style = LINEAR_SILU[kind]
            since = self.rng.randrange(calls) if self.chance(30) else 0
            out.append(Fuse(kind, pattern, style, form, self.chance(70), since))
        return tuple(out)


def _basic_names(ops: tuple[Any, ...]) -> list[str]:
    """The basic operations of the longest run, by class."""
    runs: list[list[str]] = [[]]
    for op in ops:
        if isinstance(op, Nest):
            runs += [_basic_names(op.ops), []]
        elif op.kind.startswith("torch."):
            runs.append([])
        elif op.kind == "Linear":
            runs[-1] += ["BasicLinear", *(["Bias"] if op.options.get("bias", True) else [])]
        else:
            runs[-1].append(op.kind)
    return max(runs, key=len)


def random_case(rng: random.Random, recipes: bool = False) -> Case:
    """``recipes``: a pipeline in low precision, with a drawn recipe."""
    names = tuple(RECIPES)
    return _Maker(rng, names[rng.randrange(len(names))] if recipes else "").case()


def numbered_case(seed: int, number: int, recipes: bool = False) -> Case:
    """Case ``number`` of a soak with this seed."""
    return random_case(random.Random(f"{seed}:{number}"), recipes)


cases = st.randoms(use_true_random=False).map(random_case)
recipe_cases = st.randoms(use_true_random=False).map(lambda rng: random_case(rng, recipes=True))
