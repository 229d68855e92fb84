"""Steps with cuBLASLt's epilogues used wherever they exist, against float64. Run by
test_cuda_epilogues.py in a process of its own, since whether they are used is asked once."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import gelu, layer_norm, relu

import ligature as te

Tensor = torch.Tensor
T, H, F = 96, 64, 136
CUDA: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}


def block(kind: str, bias: bool, recompute: str, hidden: int = F) -> te.ops.Sequential:
    return te.ops.Sequential(
        te.ops.LayerNorm(H, **CUDA),
        te.ops.Linear(H, hidden, bias=bias, **CUDA),
        getattr(te.ops, kind)(),
        te.ops.Linear(hidden, H, bias=bias, **CUDA),
        recompute=recompute,
    )


def reference(
    model: te.ops.Sequential, kind: str, bias: bool, x: Tensor, dy: Tensor
) -> list[Tensor]:
    """Plain PyTorch in float64, with what enters the first product rounded as the norm rounds it:
    else values beside ReLU's edge are on its other side."""
    leaves = [p.detach().double().requires_grad_() for p in model.parameters()]
    x = x.detach().double().requires_grad_()
    w1, b1, w2, b2 = leaves[2:] if bias else [leaves[2], None, leaves[3], None]
    normed = layer_norm(x, (H,), leaves[0], leaves[1])
    z = (normed + (normed.bfloat16().double() - normed).detach()) @ w1.t()
    z = z if b1 is None else z + b1
    a = gelu(z, approximate="tanh") if kind == "GELU" else relu(z)
    y = a @ w2.t()
    y = y if b2 is None else y + b2
    return [y, *torch.autograd.grad(y, [x, *leaves], dy.double())]


def step(model: te.ops.Sequential, x: Tensor, dy: Tensor, retain: bool = False) -> list[Tensor]:
    """The output and all gradients; with `retain` of a second backward, which overwrites."""
    leaf = x.detach().requires_grad_()
    y = model(leaf)
    leaves = [leaf, *model.parameters()]
    if retain:
        first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    grads = torch.autograd.grad(y, leaves, dy)
    if retain:
        for a, b in zip(first, grads, strict=True):
            assert torch.equal(a, b)
    return [y.detach(), *grads]


def close(got: list[Tensor], wanted: list[Tensor], where: str) -> None:
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert a.shape == b.shape, where
        error = float((a.double() - b).detach().abs().max() / b.detach().abs().max())
        assert error < 3e-2, f"{where}: result {i} is off by {error}"


def kernels(explained: te.Explanation, direction: str) -> list[str]:
    (part,) = explained.parts
    return [kernel["name"] for s in part[direction] for kernel in s["kernels"]]


def check_block(kind: str, bias: bool, recompute: str) -> None:
    where = f"{kind} bias={bias} recompute={recompute}"
    model = block(kind, bias, recompute)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    x, dy = torch.randn(T, H, **CUDA), torch.randn(T, H, **CUDA)
    wanted = reference(model, kind, bias, x, dy)
    got = step(model, x, dy, retain=True)
    close(got, wanted, where)
    for explained in (model.explain(), model.explain(x.requires_grad_())):
        forward, backward = (kernels(explained, d) for d in ("forward", "backward"))
        assert "linear_activated_forward" in forward, f"{where}: {forward}"
        assert not any(k.startswith("activation_forward") for k in forward), f"{where}: {forward}"
        if recompute == "none":
            assert "linear_activated_backward" in backward, f"{where}: {backward}"
            assert "activation_backward" not in backward, f"{where}: {backward}"
        elif bias:
            assert "linear_weight_bias_grad" in backward, f"{where}: {backward}"
            assert "bias_backward" not in backward, f"{where}: {backward}"
    for a, b in zip(step(model, x, dy), got, strict=True):
        assert torch.equal(a, b), f"{where}: other bits"
    with torch.no_grad():
        close([model(x)], wanted[:1], f"{where} without gradients")


def check_alone() -> None:
    """An activation at the end, and a linear with nothing beside it."""
    x = torch.randn(T, H, **CUDA)
    for kind in ("GELU", "ReLU"):
        model = te.ops.Sequential(te.ops.Linear(H, F, **CUDA), getattr(te.ops, kind)())
        dy = torch.randn(T, F, **CUDA)
        w, b = (p.detach().double().requires_grad_() for p in model.parameters())
        leaf = x.double().requires_grad_()
        z = leaf @ w.t() + b
        y = gelu(z, approximate="tanh") if kind == "GELU" else relu(z)
        wanted = [y, *torch.autograd.grad(y, [leaf, w, b], dy.double())]
        close(step(model, x, dy, retain=True), wanted, f"linear and {kind}")
    model = te.ops.Sequential(te.ops.Linear(H, F, **CUDA))
    dy = torch.randn(T, F, **CUDA)
    w, b = (p.detach().double() for p in model.parameters())
    wanted = [x.double() @ w.t() + b, dy.double() @ w, dy.double().t() @ x.double()]
    wanted.append(dy.double().sum(0))
    close(step(model, x, dy), wanted, "a linear")
    assert "linear_weight_bias_grad" in kernels(model.explain(), "backward")


def check_what_does_not_fit() -> None:
    """Rows that are no whole vectors, and other dtypes, take the separate kernels."""
    odd = block("GELU", True, "none", hidden=100)
    x = torch.randn(T, H, **CUDA)
    step(odd, x, torch.randn(T, H, **CUDA))
    text = str(odd.explain())
    assert "linear_activated" not in text, text
    assert "activation_backward" in text, text
    model = te.ops.Sequential(te.ops.Linear(H, F, device="cuda"), te.ops.GELU())
    step(model, x.float(), torch.randn(T, F, device="cuda"))
    assert "linear_activated" not in str(model.explain())


def check_graph() -> None:
    model = block("GELU", True, "none")
    x, dy = torch.randn(T, H, **CUDA), torch.randn(T, H, **CUDA)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, x, dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(model, x, dy)
    x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(captured, step(model, x, dy), strict=True):
        assert torch.equal(a, b)


def check_no_waiting() -> None:
    model = block("GELU", True, "none")
    x, dy = torch.randn(T, H, **CUDA), torch.randn(T, H, **CUDA)
    step(model, x, dy)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(model, x, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    torch.manual_seed(1)
    for kind in ("GELU", "ReLU"):
        for bias in (True, False):
            for recompute in ("none", "cheap"):
                check_block(kind, bias, recompute)
    check_alone()
    check_what_does_not_fit()
    check_graph()
    check_no_waiting()
    print("all right")
