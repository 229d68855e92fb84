"""Routing: tokens to their experts and back."""

from __future__ import annotations

import torch

from .._builtin import BuiltinOperation, option

__all__ = ["Combine", "Dispatch", "TopKRouter"]


class Dispatch(BuiltinOperation):
    """A copy of each token for each of its experts, ordered by expert.

    Rows are all leading dimensions of the input, ``[..., columns]``; the output is
    ``[tokens * top_k, columns]``. The rows of one expert are in the order of their tokens. An index
    below 0, or not below ``num_experts``, sends its copy nowhere; as many rows at the end are
    zeros.

    Extra inputs:
        0. expert indices, ``[tokens, top_k]`` integers of any dtype.
        1. router probabilities, ``[tokens, top_k]`` of any floating dtype.

    Extra outputs:
        0. split sizes, int64 ``[num_experts]``: how many rows each expert has.
        1. row probabilities, ``[tokens * top_k]``: the probability of each row's token and expert.
        2. the routing map, for :class:`Combine`: int32 ``[2, ..., top_k]``.

    Args:
        num_experts: number of experts.
    """

    num_experts: int = option("num_experts", "Number of experts.")

    def __init__(self, num_experts: int) -> None:
        super().__init__(num_experts=int(num_experts))


class Combine(BuiltinOperation):
    """The sum of what a token's experts made of it.

    The input is ``[tokens * top_k, columns]`` in the order of :class:`Dispatch`; the output has the
    shape of that operation's input. Sums are made in float32 (float64 for float64) in the order of
    a token's experts and rounded once.

    Extra inputs:
        0. the routing map of :class:`Dispatch`.
        1. with ``weighted``: a weight for each of a token's experts, ``[tokens, top_k]`` of any
           floating dtype.

    Args:
        weighted: multiply each row by a weight.
    """

    weighted: bool = option("weighted", "Whether each row is multiplied by a weight.")

    def __init__(self, *, weighted: bool = False) -> None:
        super().__init__(weighted=weighted)


class TopKRouter(BuiltinOperation):
    """Chooses ``top_k`` experts for each token; its output is its input, in the same memory.

    Logits ``l = x W^T`` and all that follows are computed in float32 (float64 where the input or
    the weight is). The best expert comes first, and among equals the one with the lowest index.
    The input's leading dimensions together are the tokens.

    Extra outputs:
        0. expert indices, int64 ``[tokens, top_k]``.
        1. probabilities, ``[tokens, top_k]``, float32 (or float64).
        2. the auxiliary loss, a scalar: the load-balancing loss plus the z-loss. To be added to a
           model's loss.
        3. tokens per expert, int64 ``[num_experts]``.

    Args:
        hidden_size: size of the input's last dimension.
        num_experts, top_k: how many experts there are, and how many a token is sent to.
        score_function: ``"softmax"`` or ``"sigmoid"``, of the logits.
        use_pre_softmax: softmax over all experts before they are chosen, instead of over the logits
            of those that are.
        normalize: divide a token's probabilities by their sum. By default with ``"sigmoid"`` and
            more than one expert. (After a softmax over the chosen, the sum is one anyway.)
        num_groups, group_topk: experts lie in ``num_groups`` groups of neighbours, and a token's
            experts must be in the ``group_topk`` best. A group is as good as the sum of its
            ``top_k // group_topk`` best scores.
        scaling_factor: probabilities are multiplied by it.
        expert_bias: a parameter ``expert_bias`` [num_experts] in float32, zeros at first, that is
            added to scores where experts are chosen and nowhere else. It has no gradient; change it
            in place, from the tokens per expert.
        aux_loss_coeff: of the load-balancing loss
            ``num_experts / top_k * sum_e(share_e * probability_e)``, with the share of the tokens
            that are sent to an expert and its mean score (with ``"sigmoid"``, of scores that are
            divided by their sum). Who is sent where is told by scores alone, without groups and
            bias. It is 1 where experts have equal shares.
        z_loss_coeff: of the mean of ``logsumexp(l)²``.
        device, dtype: of the weight.
    """

    hidden_size: int = option("hidden_size", "Size of the input's last dimension.")
    num_experts: int = option("num_experts", "Number of experts.")
    top_k: int = option("top_k", "To how many experts a token is sent.")
    score_function: str = option("score_function", "Of the logits: 'softmax' or 'sigmoid'.")
    use_pre_softmax: bool = option("use_pre_softmax", "Whether softmax is over all experts.")
    num_groups: int | None = option("num_groups", "Number of groups of experts.")
    group_topk: int | None = option("group_topk", "From how many groups experts are chosen.")
    scaling_factor: float | None = option("scaling_factor", "Of the probabilities.")
    aux_loss_coeff: float = option("aux_loss_coeff", "Of the load-balancing loss.")
    z_loss_coeff: float = option("z_loss_coeff", "Of the z-loss.")
    expert_bias: torch.nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score_function: str = "softmax",
        use_pre_softmax: bool = False,
        normalize: bool | None = None,
        num_groups: int | None = None,
        group_topk: int | None = None,
        scaling_factor: float | None = None,
        expert_bias: bool = False,
        aux_loss_coeff: float = 0.0,
        z_loss_coeff: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden_size=int(hidden_size),
            num_experts=int(num_experts),
            top_k=int(top_k),
            score_function=score_function,
            use_pre_softmax=use_pre_softmax,
            normalize=normalize,
            num_groups=num_groups,
            group_topk=group_topk,
            scaling_factor=None if scaling_factor is None else float(scaling_factor),
            expert_bias=expert_bias,
            aux_loss_coeff=float(aux_loss_coeff),
            z_loss_coeff=float(z_loss_coeff),
        )
        self._register(device, dtype)
        if expert_bias:
            bias = self.expert_bias.detach().float()
            self.expert_bias = torch.nn.Parameter(bias, requires_grad=False)
