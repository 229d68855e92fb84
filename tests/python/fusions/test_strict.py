"""Fusions that must fire."""

from __future__ import annotations

import threading

import pytest
import torch

import ligature as te

ops = te.ops
ACT = "ForwardLinearBiasActivation"


def test_a_fusion_that_fires() -> None:
    model = ops.Sequential(ops.Linear(4, 4), ops.GELU(), strict=[ACT, "BackwardActivationBias"])
    assert model.strict == (ACT, "BackwardActivationBias")
    model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    with torch.no_grad():  # no backward, so none of its fusions
        model(torch.randn(2, 4))


def test_a_fusion_that_does_not_fire_says_why() -> None:
    model = ops.Sequential(ops.Linear(4, 4), ops.Dropout(0.1), ops.GELU(), strict=[ACT])
    reason = (
        r"strict: fusion 'ForwardLinearBiasAdd' did not fire for \[BasicLinear, Bias, Dropout, "
        r"GELU\]: at 0 BasicLinear: wanted AddExtraInput, found Dropout"
    )
    model(torch.randn(2, 4))  # linear and bias are fused under the same name
    model.strict = ["ForwardLinearBiasAdd"]
    for _ in range(2):  # the plan that failed is not kept
        with pytest.raises(RuntimeError, match=reason):
            model(torch.randn(2, 4))
    assert "wanted AddExtraInput" in str(model.explain((2, 4)))  # explaining works all the same
    model.strict = []
    model(torch.randn(2, 4))


def test_reasons() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="no such fusion is registered; there are DenseMLP"):
        ops.Sequential(ops.SiLU(), strict=["Nonsense"])(x)
    with pytest.raises(RuntimeError, match=r"its pattern \(BasicLinear, .*\) begins nowhere here"):
        ops.Sequential(ops.SiLU(), strict=["ForwardLinearBiasAdd"])(x)
    with pytest.raises(RuntimeError, match="recompute is not 'cheap'"):
        ops.Sequential(
            ops.LayerNorm(4), ops.Linear(4, 8), ops.GELU(), ops.Linear(8, 4), strict=["DenseMLP"]
        )(x)
    with pytest.raises(RuntimeError, match="fusing is switched off"):
        ops.OperationFuser([ops.Linear(4, 4), ops.GELU()], fuse=False, strict=[ACT])(x)
    with pytest.raises(TypeError, match="a fusion is named by a str, got int"):
        ops.Sequential(strict=[1])


def test_as_a_context() -> None:
    good = ops.Sequential(ops.Linear(4, 4), ops.GELU())
    bad = ops.Sequential(ops.Linear(4, 4), ops.Dropout(0.1))
    x = torch.randn(2, 4)
    bad(x)  # a plan that is already there is asked too
    inner = te.strict("ForwardLinearBiasAdd", where="any")
    with te.strict("ForwardLinearBiasAdd", where="any"):
        inner.__enter__()
        good(x)
        with pytest.raises(RuntimeError, match=r"fired nowhere:\n  .*found GELU"):
            inner.__exit__(None, None, None)
        ops.Sequential(ops.Linear(4, 4), ops.AddExtraInput())(x, x)
    with te.strict(ACT):
        good(x)
        with pytest.raises(RuntimeError, match="'BackwardLinearAdd' did not fire"):  # noqa: SIM117
            with te.strict(["BackwardLinearAdd"]):
                bad(x.clone().requires_grad_())
        good(x)
    bad(x)
    with te.strict(ACT, where="any"):
        ops.Sequential(ops.SiLU())(x)
        good(x)
    with (
        pytest.raises(RuntimeError, match="fired nowhere: no operations ran"),
        te.strict(ACT, where="any"),
    ):
        pass
    with pytest.raises(ValueError, match="where must be 'every' or 'any', got 'some'"):
        te.strict(ACT, where="some")


def test_an_error_inside_a_context_is_passed_on() -> None:
    with pytest.raises(ZeroDivisionError), te.strict(ACT, where="any"):
        1 / 0  # noqa: B018
    ops.Sequential(ops.SiLU())(torch.randn(2))


def test_a_context_is_of_its_thread() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            ops.Sequential(ops.SiLU())(torch.randn(2))
        except BaseException as error:
            errors.append(error)

    with te.strict(ACT):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not errors


def test_a_sequential_with_several_fusers() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    model = ops.Sequential(
        ops.Linear(4, 4), ops.GELU(), torch.nn.Identity(), ops.SiLU(), strict=[ACT]
    )
    model(x)
    model.strict = ["BackwardLinearScale"]
    with pytest.raises(RuntimeError, match="fired nowhere") as error:
        model(x)
    assert "wanted ConstantScale, found Bias" in str(error.value)
    assert "[SiLU]: " in str(error.value)
    hooked = ops.Sequential(ops.Linear(4, 4), ops.GELU(), strict=["BackwardActivationBias"])
    hooked(x)
    hooked[1].register_forward_hook(lambda *args: None)
    with pytest.raises(RuntimeError, match=r"fired nowhere:\n  \[BasicLinear, Bias\]: at 1 Bias"):
        hooked(x)


def test_fusions_of_ones_own() -> None:
    class Twice(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            for ctx in basic_op_ctxs:
                ctx.save_for_backward()
            return input_ * 4, [()] * 2

    rule = ops.Fusion([ops.ConstantScale, ops.ConstantScale], lambda a, b: Twice([a, b]), name="x2")
    model = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(2.0), strict=["x2"])
    with pytest.raises(RuntimeError, match="no such fusion is registered"):
        model(torch.ones(2))
    with ops.register_forward_fusion(rule):
        assert model(torch.ones(2)).tolist() == [4, 4]
        with te.strict("Twice"):  # by the name of what it makes
            model(torch.ones(2))
    with pytest.raises(RuntimeError, match="no such fusion is registered"):
        model(torch.ones(2))


def test_copies_and_slices() -> None:
    import copy

    model = ops.Sequential(ops.Linear(4, 4), ops.GELU(), ops.SiLU(), strict=[ACT])
    assert copy.deepcopy(model).strict == (ACT,)
    assert (model + ops.Sequential(ops.SiLU())).strict == (ACT,)
    assert model[1:].strict == ()  # a part need not hold what the whole must
