"""Trains one small language model twice, in plain PyTorch and with Ligature, and compares.

The text is the project's LICENSE, the model a transformer that predicts its next character. Both
runs start from the same parameters and see the same batches, so their losses must agree.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import ligature as te

TEXT = Path(__file__).resolve().parents[2] / "LICENSE"


class TorchBlock(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width))
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 8 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        batch, length, _ = qkv.shape
        q, k, v = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(batch, length, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.proj(self.attend(self.qkv(x)))
        gate, linear = self.fc1(self.norm(x)).chunk(2, dim=-1)
        return x + self.fc2(nn.functional.silu(gate) * linear)


class LigatureBlock(TorchBlock):
    """The same block; its parameters are those of the plain one, run by fusers."""

    def __init__(self, width: int, heads: int, recompute: str) -> None:
        nn.Module.__init__(self)
        self.heads = heads
        start, end = te.ops.MakeExtraOutput(), te.ops.AddExtraInput()
        start.set_extra_output_channel(0, "residual", output_to_caller=False)
        end.set_extra_input_channel(0, "residual")
        self.qkv = te.ops.Sequential(te.ops.LayerNorm(width), te.ops.Linear(width, 3 * width))
        self.proj = te.ops.Sequential(te.ops.Linear(width, width), te.ops.AddExtraInput())
        self.mlp = te.ops.Sequential(
            start,
            te.ops.LayerNorm(width),
            te.ops.Linear(width, 8 * width),
            te.ops.SwiGLU(),
            te.ops.Linear(4 * width, width),
            end,
            recompute=recompute,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.proj(self.attend(self.qkv(x)), x))


class Model(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def saved_bytes(step: Callable[[], torch.Tensor]) -> int:
    """What autograd keeps between forward and backward, each storage counted once."""
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(seen.values())


def train(
    name: str, model: nn.Module, batches: list[torch.Tensor]
) -> tuple[list[float], float, int]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    kept = saved_bytes(lambda: loss_of(batches[0]))
    losses: list[float] = []
    times: list[float] = []
    for i, tokens in enumerate(batches):
        start = time.perf_counter()
        loss = loss_of(tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
        done = (i + 1) * 30 // len(batches)
        bar = "█" * done + "░" * (30 - done)
        end = "\r" if sys.stdout.isatty() else ""
        if end or i + 1 == len(batches):
            print(f"{name:>9} {bar} step {i + 1:4d}  loss {losses[-1]:.4f}", end=end, flush=True)
            if not end:
                print()
    if sys.stdout.isatty():
        print()
    return losses, sorted(times)[len(times) // 2], kept


def plan_text(fuser: te.ops.OperationFuser) -> str:
    lines = []
    for title, steps in (("forward", fuser._forward_ops), ("backward", fuser._backward_ops)):
        parts = []
        for op, indices in steps or []:
            covered = "+".join(type(fuser._basic_ops[i]).__name__ for i in indices)
            parts.append(covered if len(indices) == 1 else f"{type(op).__name__}({covered})")
        lines.append(f"  {title:>8}: " + " → ".join(parts))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--recompute", default="none", choices=["none", "cheap"])
    args = parser.parse_args()
    context, width, heads, layers, batch = 64, 96, 4, 2, 8

    text = TEXT.read_text()
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    torch.manual_seed(0)
    starts = torch.randint(len(data) - context - 1, (args.steps, batch))
    batches = [torch.stack([data[s : s + context + 1] for s in row]) for row in starts]
    batches = [tokens.to(args.device) for tokens in batches]

    torch.set_default_device(args.device)
    plain = Model(len(letters), context, width, [TorchBlock(width, heads) for _ in range(layers)])
    fused = Model(
        len(letters),
        context,
        width,
        [LigatureBlock(width, heads, args.recompute) for _ in range(layers)],
    )
    with torch.no_grad():
        for to, source in zip(fused.parameters(), plain.parameters(), strict=True):
            to.copy_(source)
    count = sum(p.numel() for p in plain.parameters())
    print(
        f"{count:,} parameters, {args.steps} steps of {batch} x {context} characters, {args.device}"
    )

    torch_run = train("PyTorch", plain, batches)
    ligature_run = train("Ligature", fused, batches)
    print("\nThe plan of the first MLP:")
    print(plan_text(fused.blocks[0].mlp._module_groups[0]))

    print(f"\n{'':>9}  {'first loss':>10}  {'last loss':>10}  {'ms/step':>8}  {'saved KiB':>9}")
    for name, (losses, seconds, kept) in (("PyTorch", torch_run), ("Ligature", ligature_run)):
        row = f"{losses[0]:>10.4f}  {losses[-1]:>10.4f}  {1e3 * seconds:>8.2f}  {kept / 1024:>9.0f}"
        print(f"{name:>9}  {row}")
    difference = max(abs(a - b) for a, b in zip(torch_run[0], ligature_run[0], strict=True))
    print(f"\nlargest difference of the losses: {difference:.2e}")
    if difference > 0.05:
        print("The two runs disagree.")
        return 1
    print("The two runs agree.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
