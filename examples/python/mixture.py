"""A mixture of experts, written twice: in plain PyTorch and with Ligature.

Both give their result, the loss that balances the experts' load, and how many tokens each expert
had. They have the same parameters in the same order; plain PyTorch has one for all experts.
"""

from __future__ import annotations

import torch
from torch import nn

import ligature as te

EXPERTS, TOP_K = 8, 2
BALANCE = 0.01  # how much the balance of the load counts beside the loss


class TorchExperts(nn.Module):
    """A router, and what the experts that it chose make of each token.

    The rows of a token's experts are sorted, so that each linear layer of all experts is one
    ``grouped_mm``.
    """

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.empty(EXPERTS, width))
        self.fc1 = nn.Parameter(torch.empty(EXPERTS, 2 * inner, width))
        self.fc2 = nn.Parameter(torch.empty(EXPERTS, width, inner))
        for weight in self.parameters():
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch.autocast(tokens.device.type, enabled=False):
            logits = nn.functional.linear(tokens.float(), self.router)
        best = logits.topk(TOP_K)
        weights = best.values.softmax(-1).flatten()
        counts = best.indices.flatten().bincount(minlength=EXPERTS)
        balance = EXPERTS / TOP_K * (counts / len(tokens) * logits.softmax(-1).mean(0)).sum()

        order = best.indices.flatten().argsort(stable=True)
        rows, ends = order // TOP_K, counts.cumsum(0).int()
        z = grouped(tokens[rows], self.fc1, ends)
        gate, linear = z.chunk(2, dim=-1)
        a = nn.functional.silu(gate) * linear * weights[order, None].to(z.dtype)
        y = grouped(a, self.fc2, ends)
        out = torch.zeros(tokens.shape, dtype=torch.float32).index_add(0, rows, y.float())
        return out.to(y.dtype), BALANCE * balance, counts


class TorchMixture(nn.Module):
    """A residual around norm, router and experts."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.experts = TorchExperts(width, inner)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y, balance, counts = self.experts(self.norm(x).flatten(0, -2))
        return x + y.view(x.shape), balance, counts


def grouped(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each expert's rows times its weight; torch.autocast does not know ``grouped_mm``."""
    dtype = weights.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    return nn.functional.grouped_mm(x.to(dtype), weights.to(dtype).transpose(1, 2), offs=ends)


def ligature_mixture(width: int, inner: int, recompute: str) -> te.ops.Sequential:
    """The same: one pipeline, in which splits, weights and the residual go by named channels."""
    start, end = te.ops.MakeExtraOutput(), te.ops.AddExtraInput()
    start.set_extra_output_channel(0, "residual", output_to_caller=False)
    end.set_extra_input_channel(0, "residual")
    experts = te.ops.mixture_of_experts(width, inner, EXPERTS, TOP_K, aux_loss_coeff=BALANCE)
    router = experts[0]
    router.set_extra_output_channel(3, "experts.counts")
    return te.ops.Sequential(start, te.ops.LayerNorm(width), *experts, end, recompute=recompute)
