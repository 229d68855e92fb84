"""A few steps of training, as in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from reference import assert_close, make_mlp, torch_twin

import ligature.ops as ops

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def train(model, optimizer, batches, targets):
    losses = []
    for x, target in zip(batches, targets, strict=True):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("recompute", ["none", "cheap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_five_steps_as_torch(device, kind, recompute, dtype):
    model = make_mlp(recompute=recompute, dtype=dtype)
    twin = torch_twin(model)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    batches = torch.randn(5, 16, 8, dtype=dtype)
    targets = torch.randn(5, 16, 8, dtype=dtype)
    losses = [train(m, OPTIMIZERS[kind](m.parameters()), batches, targets) for m in (model, twin)]
    assert_close(losses[0], losses[1], dtype, scale=10)
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert_close(a, b, dtype, scale=100, what=name)
        assert not torch.equal(a, start[name])


def test_a_loss_goes_down(device):
    model = ops.Sequential(
        ops.RMSNorm(8),
        ops.Linear(8, 32, bias=False),
        ops.SwiGLU(),
        ops.Linear(16, 8, bias=False),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    x = torch.randn(64, 8)
    target = torch.sin(3 * x)
    losses = train(model, optimizer, [x] * 40, [target] * 40)
    assert losses[-1] < 0.5 * losses[0]


def test_training_with_autocast_and_a_scaler(device):
    model = make_mlp()
    twin = torch_twin(model)
    x, target = torch.randn(16, 8), torch.randn(16, 8)
    for m in (model, twin):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=256.0)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.float16):
                loss = torch.nn.functional.mse_loss(m(x).float(), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert_close(a, b, torch.float32, scale=200, what=name)


def test_inside_a_torch_model(device):
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            self.mlp = make_mlp()
            self.head = torch.nn.Linear(8, 3)

        def forward(self, x):
            x = x + self.attention(x, x, x, need_weights=False)[0]
            return self.head(x + self.mlp(x))

    model = Block()
    twin = Block()
    twin.load_state_dict(model.state_dict())
    twin.mlp = torch_twin(model.mlp)
    x, target = torch.randn(4, 5, 8), torch.randn(4, 5, 3)
    losses = [
        train(m, torch.optim.SGD(m.parameters(), lr=0.1), [x] * 3, [target] * 3)
        for m in (model, twin)
    ]
    assert_close(losses[0], losses[1], torch.float32, scale=10)
