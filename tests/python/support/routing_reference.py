"""Routing in plain PyTorch, one token after the other, differentiable by autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import ligature as te

Tensor = torch.Tensor


def slots_by_expert(experts: Tensor, num_experts: int) -> list[tuple[int, int]]:
    """The slots (token, k) in the order of their rows."""
    slots = [(t, k) for t in range(experts.shape[0]) for k in range(experts.shape[1])]
    table = experts.tolist()
    return [slot for e in range(num_experts) for slot in slots if table[slot[0]][slot[1]] == e]


def splits_of(experts: Tensor, num_experts: int) -> Tensor:
    table = experts.flatten().tolist()
    return torch.tensor([table.count(e) for e in range(num_experts)], device=experts.device)


def routing_map_of(experts: Tensor, num_experts: int) -> Tensor:
    tokens, top_k = experts.shape
    routing_map = torch.full((2, tokens, top_k), -1, dtype=torch.int32)
    for row, (t, k) in enumerate(slots_by_expert(experts, num_experts)):
        routing_map[0].view(-1)[row] = t * top_k + k
        routing_map[1, t, k] = row
    return routing_map.to(experts.device)


def dispatch(x: Tensor, experts: Tensor, probs: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Rows and row probabilities."""
    flat = x.reshape(-1, x.shape[-1])
    order = slots_by_expert(experts, num_experts)
    empty = experts.numel() - len(order)
    if experts.numel() == 0:
        return flat.repeat(experts.shape[1], 1), probs.reshape(0)
    rows = [flat[t] for t, _ in order] + [0 * flat[0]] * empty
    weights = [probs[t, k] for t, k in order] + [0 * probs[0, 0]] * empty
    return torch.stack(rows), torch.stack(weights)


def combine(rows: Tensor, experts: Tensor, num_experts: int, weights: Tensor | None) -> Tensor:
    tokens = experts.shape[0]
    if tokens == 0:
        return rows if weights is None else rows * weights.reshape(0, 1)
    zero = 0 * rows[0] if weights is None else 0 * rows[0] * weights[0, 0]
    sums = [zero] * tokens
    for row, (t, k) in enumerate(slots_by_expert(experts, num_experts)):
        sums[t] = sums[t] + (rows[row] if weights is None else rows[row] * weights[t, k])
    return torch.stack(sums)


def choose(scores: Tensor, count: int) -> Tensor:
    """The indices of the largest, the lowest first among equals."""
    chosen = [
        sorted(range(len(row)), key=lambda e, row=row: (-row[e], e))[:count]  # type: ignore[misc]
        for row in scores.tolist()
    ]
    return torch.tensor(chosen, dtype=torch.long, device=scores.device).view(-1, count)


def router(
    x: Tensor,
    weight: Tensor,
    top_k: int,
    *,
    score_function: str = "softmax",
    use_pre_softmax: bool = False,
    normalize: bool | None = None,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    expert_bias: Tensor | None = None,
    aux_loss_coeff: float = 0.0,
    z_loss_coeff: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Experts, probabilities, the auxiliary loss, tokens per expert."""
    logits = F.linear(x.reshape(-1, x.shape[-1]), weight)
    tokens, num_experts = logits.shape
    sigmoid = score_function == "sigmoid"
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    late = not sigmoid and not use_pre_softmax
    values = logits if late else scores
    worth = values.detach().clone()
    if expert_bias is not None:
        worth += expert_bias.detach()
    if num_groups is not None and group_topk is not None:
        size = num_experts // num_groups
        for t in range(tokens):
            of_group = worth[t].view(num_groups, size).sort(descending=True).values
            total = of_group[:, : max(top_k // group_topk, 1)].sum(-1)
            best = set(choose(total[None], group_topk)[0].tolist())
            for e in range(num_experts):
                if e // size not in best:
                    worth[t, e] = -torch.inf
    experts = choose(worth, top_k)
    probs = values.gather(1, experts)
    if late:
        probs = probs.softmax(-1)
    elif normalize or (normalize is None and sigmoid and top_k > 1):
        probs = probs / probs.sum(-1, keepdim=True)
    probs = probs * (1.0 if scaling_factor is None else scaling_factor)
    loss = 0 * logits.sum()
    if aux_loss_coeff and tokens:
        shares = scores / scores.sum(-1, keepdim=True)
        sent = splits_of(choose(values.detach(), top_k), num_experts).double() / tokens
        loss = loss + aux_loss_coeff * num_experts / top_k * (sent * shares.mean(0)).sum()
    if z_loss_coeff and tokens:
        loss = loss + z_loss_coeff * logits.logsumexp(-1).square().mean()
    return experts, probs, loss, splits_of(experts, num_experts)


class Choices(te.ops.BasicOperation):
    """Its input, and as an extra output indices that depend on the number of tokens alone."""

    num_extra_outputs = 1

    def __init__(self, num_experts: int, top_k: int, channel: str = "experts") -> None:
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.set_extra_output_channel(0, channel, output_to_caller=False)

    def indices(self, tokens: int, device: torch.device) -> Tensor:
        """Some are of no expert, and some tokens have one several times."""
        generator = torch.Generator().manual_seed(tokens)
        shape = (tokens, self.top_k)
        chosen = torch.randint(-1, self.num_experts + 1, shape, generator=generator)
        return chosen.to(device)

    def fuser_forward(self, basic_op_ctxs, input_, **unused):  # type: ignore[no-untyped-def]
        tokens = input_.numel() // input_.shape[-1]
        return input_.clone(), [(self.indices(tokens, input_.device),)]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):  # type: ignore[no-untyped-def]
        return grad_output, [()], [()]
