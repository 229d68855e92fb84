"""One small language model, written twice: in plain PyTorch and with Ligature.

The two have the same parameters in the same order; only what runs a block differs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from mixture import TorchMixture, ligature_mixture
from torch import nn

import ligature as te

# How the linears of a block may compute; none: as everything else does.
RECIPES: dict[str, Callable[[], te.recipe.Recipe] | None] = {
    "none": None,
    "delayed": te.recipe.DelayedScaling,
    "current": te.recipe.Float8CurrentScaling,
    "block": te.recipe.Float8BlockScaling,
    "mxfp8": te.recipe.MXFP8BlockScaling,
    "nvfp4": te.recipe.NVFP4BlockScaling,
}


def low_precision(recipe: str) -> te.autocast:
    """The context for one of RECIPES, to be entered anew for every step."""
    make = RECIPES[recipe]
    return te.autocast(enabled=make is not None, recipe=make() if make else None)


class Attention(nn.Module):
    """A residual around causal attention with rotary positions; subclasses bring its linears."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        half = width // heads // 2
        angles = torch.outer(torch.arange(context), 100.0 ** (-torch.arange(half) / half))
        self.register_buffer("turn", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Turns pairs of numbers by angles that grow with the place in the text."""
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turn[: x.shape[-2]]).flatten(-2).to(x.dtype)

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        batch, length, _ = qkv.shape
        q, k, v = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(
            self.rotated(q), self.rotated(k), v, is_causal=True
        )
        return y.transpose(1, 2).reshape(batch, length, -1)


class TorchAttention(Attention):
    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__(width, heads, context)
        self.qkv = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width))
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(self.attend(self.qkv(x)))


class LigatureAttention(Attention):
    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__(width, heads, context)
        self.qkv = te.ops.Sequential(te.ops.LayerNorm(width), te.ops.Linear(width, 3 * width))
        self.proj = te.ops.Sequential(te.ops.Linear(width, width), te.ops.AddExtraInput())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.attend(self.qkv(x)), x)


class TorchMLP(nn.Module):
    """A residual around norm, linear, SwiGLU, linear."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 8 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, linear = self.fc1(self.norm(x)).chunk(2, dim=-1)
        return x + self.fc2(nn.functional.silu(gate) * linear)


def ligature_mlp(width: int, recompute: str) -> te.ops.Sequential:
    """The same; the residual goes from its start to its end by a named channel."""
    start, end = te.ops.MakeExtraOutput(), te.ops.AddExtraInput()
    start.set_extra_output_channel(0, "residual", output_to_caller=False)
    end.set_extra_input_channel(0, "residual")
    return te.ops.Sequential(
        start,
        te.ops.LayerNorm(width),
        te.ops.Linear(width, 8 * width),
        te.ops.SwiGLU(),
        te.ops.Linear(4 * width, width),
        end,
        recompute=recompute,
    )


class Block(nn.Module):
    """Attention and an MLP, or a mixture of experts, of which it keeps what else that gave."""

    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp
        self.balance: torch.Tensor | float = 0.0
        self.counts: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mlp(self.attention(x))
        if isinstance(y, tuple):
            y, self.balance, self.counts = y
        return y


class Model(nn.Module):
    """Predicts the next token at every place of ``tokens``."""

    def __init__(self, vocabulary: int, width: int, blocks: list[Block]) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        nn.init.normal_(self.embed.weight, std=0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @property
    def balance(self) -> torch.Tensor | float:
        """Of the last call: what is added to the loss so that experts are equally busy."""
        return sum(block.balance for block in self.blocks)

    @property
    def counts(self) -> list[torch.Tensor]:
        """Of the last call: of each block with experts, how many tokens each of them had."""
        return [block.counts for block in self.blocks if block.counts is not None]


def make_pair(
    vocabulary: int,
    context: int,
    width: int,
    heads: int,
    layers: int,
    recompute: str,
    kind: str = "dense",
) -> tuple[Model, Model]:
    """The plain model, and the one with Ligature that starts from the same parameters.

    ``kind`` is "dense", or "moe" for mixtures of experts in the place of the MLPs.
    """

    of_torch, of_ligature = {
        "dense": (lambda: TorchMLP(width), lambda: ligature_mlp(width, recompute)),
        "moe": (
            lambda: TorchMixture(width, 2 * width),
            lambda: ligature_mixture(width, 2 * width, recompute),
        ),
    }[kind]
    plain = [Block(TorchAttention(width, heads, context), of_torch()) for _ in range(layers)]
    fused = [Block(LigatureAttention(width, heads, context), of_ligature()) for _ in range(layers)]
    models = Model(vocabulary, width, plain), Model(vocabulary, width, fused)
    with torch.no_grad():
        for source, to in zip(*map(_parameters, models), strict=True):
            to.copy_(source)
    return models


def _parameters(model: Model) -> list[torch.Tensor]:
    """Those of experts one by one."""
    return [part for p in model.parameters() for part in (p.unbind(0) if p.dim() == 3 else [p])]
