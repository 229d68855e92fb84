"""Times the memory-bound CPU kernels alone against PyTorch eager, torch.compile and a copy.

One table: a kernel at a size, in a dtype, forward under no_grad or forward and backward; its time,
the ratio to eager and to torch.compile (below 1.00 Ligature is faster), and what fraction of the
bandwidth of a copy it reaches, where the bytes are those that must be read and written once and the
copy moves as many. All four are measured in turns. The size is the input's; a gated activation has
half as many results. torch.compile is given the sizes as symbols, so that there is one compilation
per kernel, dtype and direction; what it has compiled it keeps on disk for the next run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timing import Run, cpu_name, interleaved
from torch import nn
from torch.nn import functional

import ligature as te

Row = dict[str, Any]
Tensors = tuple[torch.Tensor, ...]
SIZES = [(64, 256), (512, 1024), (2048, 2048), (8192, 4096)]
QUICK_SIZES = [(64, 256), (2048, 2048)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
P = 0.1


def srelu(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square()


def qgelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def clamped_swiglu(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    a = a.clamp(max=7.0)
    return a * torch.sigmoid(1.702 * a) * (b.clamp(-7.0, 7.0) + 1)


def situ_glu(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return 4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(b / 25)


PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "GELU": gelu,
    "QGELU": qgelu,
    "ReLU": functional.relu,
    "SReLU": srelu,
    "SiLU": functional.silu,
}
GATES = {
    "GLU": torch.sigmoid,
    "GEGLU": gelu,
    "QGEGLU": qgelu,
    "ReGLU": functional.relu,
    "SReGLU": srelu,
    "SwiGLU": functional.silu,
}
WHOLE = {"ClampedSwiGLU": clamped_swiglu, "SiTUGLU": situ_glu}


class Function(nn.Module):
    """A function of the input, with a bias added before where there is one."""

    def __init__(self, f: Callable[[torch.Tensor], Any], bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.f = f
        self.bias = bias

    def forward(self, x: torch.Tensor) -> Any:
        return self.f(x if self.bias is None else x + self.bias)


class Branch(nn.Module):
    """The input and its norm: backward adds the gradients of the two."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> Tensors:
        x = x.view_as(x)
        return self.norm(x), x


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@dataclass
class Case:
    """``forward``, ``backward``: how many times the input's bytes they must move."""

    plain: nn.Module
    fused: nn.Module
    forward: float
    backward: float


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if name in GATES:

        def gated(x: torch.Tensor) -> torch.Tensor:
            a, b = x.chunk(2, dim=-1)
            return GATES[name](a) * b

        return gated
    return PLAIN.get(name) or WHOLE[name]


def make(name: str, h: int, dtype: torch.dtype) -> Case:
    ops, size = te.ops, torch.finfo(dtype).bits // 8
    if name in ("LayerNorm", "RMSNorm"):
        plain = getattr(nn, name)(h, dtype=dtype)
        return Case(plain, getattr(ops, name)(h, dtype=dtype), 2, 3)
    if name.startswith("add+"):
        plain = getattr(nn, name[4:])(h, dtype=dtype)
        fused = ops.Sequential(ops.MakeExtraOutput(), getattr(ops, name[4:])(h, dtype=dtype))
        return Case(Branch(plain), fused, 2, 4)
    if name == "L2Normalization":
        return Case(Function(l2_norm), ops.L2Normalization(), 2, 3)
    if name == "Dropout":
        plain = Function(lambda x: functional.dropout(x, P))
        return Case(plain, ops.Dropout(P), 2 + 1 / size, 2 + 1 / size)
    bias = nn.Parameter(torch.randn(h, dtype=dtype))
    if name == "Bias":
        fused = ops.Bias(h, dtype=dtype)
        return Case(Function(lambda x: x, bias), fused, 2, 1)
    with_bias, name = name.startswith("Bias+"), name.removeprefix("Bias+")
    fused = getattr(ops, name)()
    if with_bias:
        fused = ops.Sequential(ops.Bias(h, dtype=dtype), fused)
    gated = name not in PLAIN
    moved = (1.5, 2.5) if gated else (2, 3)
    return Case(Function(activation(name), bias if with_bias else None), fused, *moved)


NORMS = ["LayerNorm", "RMSNorm", "add+LayerNorm", "add+RMSNorm", "L2Normalization"]
ACTIVATIONS = [*PLAIN, *GATES, *WHOLE]
ALL = [*NORMS, "Bias", *(f"Bias+{name}" for name in ACTIVATIONS), *ACTIVATIONS, "Dropout"]
KERNELS = ["LayerNorm", "RMSNorm", "add+LayerNorm", "Bias", "Bias+GELU"]
KERNELS += ["GELU", "ReLU", "SwiGLU", "Dropout"]


def forward_of(model: Callable[..., Any], x: torch.Tensor) -> Run:
    def run() -> None:
        with torch.no_grad():
            model(x)

    return run


def step_of(model: Callable[..., Any], x: torch.Tensor, parameters: list[nn.Parameter]) -> Run:
    outputs = model(x)
    grads = [torch.randn_like(y) for y in (outputs if isinstance(outputs, tuple) else (outputs,))]

    def run() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        outputs = model(x)
        torch.autograd.backward(outputs if isinstance(outputs, tuple) else (outputs,), grads)

    return run


def copy_of(size: int) -> Run:
    source = torch.ones(max(size // 2, 1), dtype=torch.uint8)
    target = torch.ones_like(source)
    return lambda: target.copy_(source)


def measure(
    kernels: list[str] = KERNELS,
    sizes: list[tuple[int, int]] = SIZES,
    dtypes: list[str] | None = None,
    seconds: float = 0.1,
    compiled: bool = True,
    tell: Callable[[str], object] = print,
) -> list[Row]:
    """``seconds`` per line of the table."""
    rows: list[Row] = []
    tell(
        f"{'kernel':<20}{'size':>10}{'dtype':>6}  {'pass':<9}{'µs':>10}"
        f"{'eager':>8}{'compile':>9}{'of copy':>9}"
    )
    for name in kernels:
        for dtype in dtypes or DTYPES:
            torch.compiler.reset()
            for t, h in sizes:
                case = make(name, h, DTYPES[dtype])
                x = torch.randn(t, h, dtype=DTYPES[dtype], requires_grad=True)
                models = [(case.fused, case.fused), (case.plain, case.plain)]
                if compiled:
                    models.append((torch.compile(case.plain, dynamic=True), case.plain))
                for both in (False, True):
                    if both:
                        runs = [step_of(m, x, list(of.parameters())) for m, of in models]
                    else:
                        runs = [forward_of(m, x) for m, _ in models]
                    moved = x.nbytes * (case.forward + both * case.backward)
                    runs.append(copy_of(int(moved)))
                    own, eager, *rest, copy = interleaved(runs, "cpu", seconds, 2)
                    row: Row = {
                        "kernel": name,
                        "size": f"{t}x{h}",
                        "dtype": dtype,
                        "pass": "fwd+bwd" if both else "fwd",
                        "us": 1e6 * own,
                        "eager": own / eager,
                        "compile": own / rest[0] if rest else None,
                        "of_copy": copy / own,
                    }
                    rows.append(row)
                    ratio = f"{row['compile']:9.2f}" if rest else f"{'-':>9}"
                    tell(
                        f"{name:<20}{row['size']:>10}{dtype:>6}  {row['pass']:<9}{row['us']:>10.1f}"
                        f"{row['eager']:>8.2f}{ratio}{row['of_copy']:>9.2f}"
                    )
                    del runs
    return rows


def parse_size(text: str) -> tuple[int, int]:
    t, h = text.split("x")
    return int(t), int(h)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", nargs="+", choices=[*ALL, "all"], default=KERNELS)
    parser.add_argument("--sizes", nargs="+", type=parse_size, metavar="ROWSxCOLUMNS")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--seconds", type=float, default=0.1, help="per line of the table")
    parser.add_argument("--quick", action="store_true", help="two sizes, without torch.compile")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--json", help="write the rows here too")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    rows = measure(
        ALL if "all" in args.kernels else args.kernels,
        args.sizes or (QUICK_SIZES if args.quick else SIZES),
        args.dtypes,
        args.seconds,
        not (args.quick or args.no_compile),
    )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
