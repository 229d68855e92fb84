"""Delayed scaling from step to step: histories and factors against a model in plain Python."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from delayed_reference import Factor, LinearReference, factor_for, state_of
from quantized_reference import assert_product

import ligature as te
from ligature.common.recipe import DelayedScaling, Format

K, N, M = 32, 48, 16


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert_product(actual, expected, torch.float32, "product", DelayedScaling())


def is_kept(device: str, uses: int, made: object, scale: object) -> bool:
    """Whether a weight that did not change is used as it was quantized before: with the factor
    ``made``, ``uses`` times in all. On a GPU, where factors are not looked at, it is quantized a
    second time in any case."""
    return uses > 1 if device == "cuda" else made == scale


def step_size(step: int) -> float:
    """Grows and falls, so that the oldest of a short history matters."""
    return [1.0, 7.0, 0.3, 0.2, 0.1, 0.05, 3.0, 0.01][step % 8]


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "margin"), [(3, 0), (1, 0), (4, 2)])
def test_steps(algo, length, margin) -> None:
    recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=algo, margin=margin)
    linear = te.ops.BasicLinear(K, N)
    reference = LinearReference(length, margin, algo)
    for step in range(8):
        x = (torch.randn(M, K) * step_size(step)).requires_grad_()
        dy = torch.randn(M, N) * step_size(step + 3)
        with te.autocast(recipe=recipe):
            y = linear(x)
        close(y, reference.forward(x, linear.weight))
        for factor in (reference.x, reference.w):
            factor.update()
        y.backward(dy)
        dx, dw = reference.backward(dy)
        reference.dy.update()
        close(x.grad, dx)
        close(linear.weight.grad, dw)
        reference.check(linear)
        with torch.no_grad():
            linear.weight.mul_(step_size(step))
        linear.weight.grad = None


def test_gradient_accumulation_quantizes_a_weight_once(device) -> None:
    """Within a step the weight is quantized again only when its factor has changed."""
    recipe = DelayedScaling(amax_history_len=2)
    linear = te.ops.BasicLinear(K, N)
    reference = LinearReference(2)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.05)
    for _ in range(3):
        expected = torch.zeros(N, K, dtype=torch.float64)
        made = None
        for uses in range(3):
            x, dy = torch.randn(M, K), torch.randn(M, N)
            cached = is_kept(device, uses, made, reference.w.scale)
            with te.autocast(recipe=recipe):
                y = linear(x, is_first_microbatch=not cached)
            close(y, reference.forward(x, linear.weight, cached=cached))
            made = reference.w.scale
            reference.x.update()
            if not cached:
                reference.w.update()
            y.backward(dy)
            expected += reference.backward(dy)[1]
            reference.dy.update()
            reference.check(linear)
        close(linear.weight.grad, expected)
        optimizer.step()
        optimizer.zero_grad()


def test_a_frozen_weight_gets_its_factor() -> None:
    recipe = DelayedScaling()
    linear = te.ops.BasicLinear(K, N).requires_grad_(False)
    reference = LinearReference(1024)
    x = torch.randn(M, K)
    for _ in range(3):
        with te.autocast(recipe=recipe), torch.no_grad():
            y = linear(x)
        close(y, reference.forward(x, linear.weight))
        reference.x.update()
        reference.w.update()
    assert state_of(linear)[0][1][0].item() == factor_for(448, linear.weight)


def test_a_model_called_twice_in_one_context() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    linear = te.ops.BasicLinear(K, N)
    reference = LinearReference(4)
    for _ in range(3):
        xs = [torch.randn(M, K), torch.randn(M, K) * 5]
        with te.autocast(recipe=recipe):
            ys = [linear(x) for x in xs]
        for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
            close(y, reference.forward(x, linear.weight, cached=i == 1))
        reference.x.update()
        reference.w.update()
        (ys[0].sum() * 3 + ys[1].sum()).backward()
        reference.dy.note(torch.full((M, N), 3.0))
        reference.dy.update()
        reference.check(linear)
        with torch.no_grad():
            linear.weight.add_(0.1)


def test_several_models_and_nested_contexts_update_once_at_the_end() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    a, b = te.ops.BasicLinear(K, K), te.ops.BasicLinear(K, N)
    x = torch.randn(M, K)
    first = Factor(448, 4)
    for step in range(2):
        with te.autocast(recipe=recipe):
            with te.autocast(recipe=recipe):
                y = a(x * (step + 1))
            scale, amax, history = state_of(a)[0][0]
            assert history[0] == (x.abs().max() if step else 0)  # not yet
            assert amax == (x * (step + 1)).abs().max()
            with te.autocast(enabled=False):
                b(y)
            b(y)
        first.note(x * (step + 1))
        first.update()
        for op, seen in ((a, x * (step + 1)), (b, y)):
            scale, amax, history = state_of(op)[0][0]
            assert amax == 0
            assert history[0] == seen.abs().max()
        scale, _, history = state_of(a)[0][0]
        assert history.tolist() == first.history
        assert scale == float(first.scale)


def test_two_backward_passes_and_one_over_both() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    linear = te.ops.BasicLinear(K, N)
    with te.autocast(recipe=recipe):
        y1, y2, y3 = (linear(torch.randn(M, K)) for _ in range(3))
    y1.backward(torch.full_like(y1, 2))
    assert state_of(linear)[1][0][2].tolist() == [2, 0, 0, 0]
    (y2.sum() * 5 + y3.sum()).backward()
    assert state_of(linear)[1][0][2].tolist() == [5, 2, 0, 0]


def test_backward_of_a_retained_graph_moves_on_each_time() -> None:
    linear = te.ops.BasicLinear(K, N)
    with te.autocast(recipe=DelayedScaling(amax_history_len=3)):
        y = linear(torch.randn(M, K))
    y.backward(torch.full_like(y, 2), retain_graph=True)
    y.backward(torch.full_like(y, 4))
    assert state_of(linear)[1][0][2].tolist() == [4, 2, 0]


def test_values_that_no_factor_can_come_from() -> None:
    """An amax of zero, or one that is not finite, keeps the old factor."""
    linear = te.ops.BasicLinear(K, N)
    recipe = DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent")
    scales = []
    for value in (2.0, 0.0, math.inf, math.nan, 4.0):
        with te.autocast(recipe=recipe), torch.no_grad():
            linear(torch.full((M, K), value))
        scales.append(state_of(linear)[0][0][0].item())
    assert scales == [224.0, 224.0, 224.0, 224.0, 112.0]
    assert state_of(linear)[0][0][2].tolist() == [4.0, 0.0]  # a NaN counts for nothing


def test_tiny_values_do_not_make_an_infinite_factor() -> None:
    linear = te.ops.BasicLinear(K, N)
    with te.autocast(recipe=DelayedScaling()), torch.no_grad():
        linear(torch.full((M, K), 1e-40))
    assert state_of(linear)[0][0][0] == 1


def test_an_exception_updates_nothing() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    linear = te.ops.BasicLinear(K, N)
    x = torch.randn(M, K)

    def fail() -> None:
        with te.autocast(recipe=recipe):
            linear(x)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    scale, amax, history = state_of(linear)[0][0]
    assert scale == 1
    assert amax == x.abs().max()
    assert not history.any()
    with te.autocast(recipe=recipe):
        with pytest.raises(KeyError), te.autocast(recipe=recipe):
            raise KeyError
        linear(x / 2)
    scale, _, history = state_of(linear)[0][0]
    assert history.tolist() == [x.abs().max().item(), 0, 0, 0]  # what was seen was seen
    assert scale.item() == factor_for(448, x)


def test_calibrating() -> None:
    """Results in high precision, and the factors for later."""
    recipe = DelayedScaling(amax_history_len=4)
    model = te.ops.Sequential(te.ops.Linear(K, N), te.ops.GELU(), te.ops.Linear(N, K))
    x = torch.randn(M, K)
    dy = torch.randn(M, K)
    model(x).backward(dy)
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    y = model(x)
    with te.autocast(enabled=False, calibrating=True, recipe=recipe):
        calibrated = model(x)
    assert torch.equal(calibrated, y)
    calibrated.backward(dy)
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, grad)
    for linear, given in ((model[0], x), (model[2], None)):
        forward, backward = state_of(linear)
        if given is not None:
            assert forward[0][2][0] == given.abs().max()
        else:
            assert backward[0][2][0] == dy.abs().max()
        assert forward[1][0].item() == factor_for(448, linear.weight)
        assert all(item[0] != 1 for item in (*forward, *backward))
    with te.autocast(recipe=recipe):
        error = (model(x) - y).norm() / y.norm()
    assert 1e-4 < error < 0.08


def test_functions_instead_of_names() -> None:
    seen = []

    def amax(history):
        seen.append(history.clone())
        return torch.max(history, dim=0).values * 2

    def scale(amax, old_scale, fp8_max, recipe):
        seen.append((amax.clone(), old_scale.clone(), fp8_max, recipe))
        return torch.where(amax > 0, fp8_max / amax, old_scale) / 4

    recipe = DelayedScaling(
        amax_history_len=3, amax_compute_algo=amax, scaling_factor_compute_algo=scale
    )
    linear = te.ops.BasicLinear(K, N)
    x = torch.randn(M, K)
    with te.autocast(recipe=recipe):
        linear(x)
    largest = x.abs().max()
    assert state_of(linear)[0][0][0] == 448 / (2 * largest) / 4
    history, (amax_, old, fp8_max, given) = seen[0], seen[1]
    assert history.tolist() == [[largest], [0], [0]]
    assert amax_.tolist() == [2 * largest]
    assert old.tolist() == [1]
    assert fp8_max == 448
    assert given is recipe


def test_functions_that_give_nonsense() -> None:
    linear = te.ops.BasicLinear(K, N)
    x = torch.randn(M, K)

    def enter(**functions):
        with te.autocast(recipe=DelayedScaling(amax_history_len=3, **functions)):
            linear(x)

    with pytest.raises(ValueError, match=r"amax_compute_algo must give one value, got \[3, 1\]"):
        enter(amax_compute_algo=lambda history: history)
    with pytest.raises(TypeError, match="what amax_compute_algo returns must be a tensor"):
        enter(amax_compute_algo=lambda history: 3)
    with pytest.raises(ZeroDivisionError):
        enter(scaling_factor_compute_algo=lambda *_: 1 / 0)
    assert not te.quantization.is_autocast_enabled()


def test_other_formats() -> None:
    for fmt, forward, backward in ((Format.E4M3, 448, 448), (Format.E5M2, 57344, 57344)):
        linear = te.ops.BasicLinear(K, N)
        with te.autocast(recipe=DelayedScaling(fp8_format=fmt)):
            y = linear(torch.full((M, K), 2.0))
        y.sum().backward()
        assert state_of(linear)[0][0][0] == forward / 2
        assert state_of(linear)[1][0][0] == backward


def test_threads_keep_their_own_steps(device) -> None:
    """Two models in two threads: neither's context ends the other's step."""
    models = [te.ops.BasicLinear(K, N) for _ in range(2)]
    references = [LinearReference(3) for _ in range(2)]
    data = [[torch.randn(M, K) * (i + 1) for i in range(10)] for _ in range(2)]
    gradients = torch.randn(M, N)
    barrier = threading.Barrier(2)
    failures = []

    def work(which: int) -> None:
        try:
            for x in data[which]:
                barrier.wait(30)
                with te.autocast(recipe=DelayedScaling(amax_history_len=3)):
                    y = models[which](x)
                y.backward(gradients)
        except Exception as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for model, reference, xs in zip(models, references, data, strict=True):
        made = None
        for uses, x in enumerate(xs):
            cached = is_kept(device, uses, made, reference.w.scale)
            reference.forward(x, model.weight, cached=cached)
            if not cached:
                made = reference.w.scale
                reference.w.update()
            reference.x.update()
            reference.backward(gradients)
            reference.dy.update()
        reference.check(model)


PROCESSES = """
    import os, sys, torch, ligature as te
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, file, reduce = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
    torch.set_default_device(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    calls = []
    # On the CPU the processes first compare what they have, as four numbers.
    compared = [4] if sys.argv[4] == "cpu" else []
    once = len(compared) + 1
    inner = dist.all_reduce

    def counted(tensor, op=None, group=None):
        calls.append((tensor.numel(), op, group))
        return inner(tensor, op=op, group=group)

    dist.all_reduce = counted
    group = dist.new_group([0, 1])
    torch.manual_seed(0)
    model = te.ops.Sequential(te.ops.Linear(32, 32), te.ops.ReLU(), te.ops.Linear(32, 32))
    other = te.ops.Linear(32, 32)
    recipe = te.recipe.DelayedScaling(amax_history_len=4, reduce_amax=reduce)
    x = torch.full((8, 32), float(rank + 1))
    for step in range(2):
        with te.autocast(recipe=recipe, amax_reduction_group=group):
            with te.autocast(recipe=recipe, amax_reduction_group=group):
                y = other(model(x))
        forward = len(calls)
        y.backward(torch.full_like(y, float(rank + 1)))
        assert not reduce or forward == (2 * step + 1) * once, calls
        assert not reduce or len(calls) == (2 * step + 2) * once, calls
    assert bool(calls) == reduce
    if reduce:
        # Two tensors of each of three linears; a frozen weight's factor is the same in step two.
        sizes = [n for n, _, _ in calls]
        assert sizes == 2 * [*compared, 6, *compared, 3], calls
        assert all(op == dist.ReduceOp.MAX and g is group for _, op, g in calls)
    part = model[0].basic_ops[0]
    seen = part.get_quantizer("forward", 0).scale.item()
    assert seen == 448 / (2 if reduce else rank + 1), seen
    last = other.basic_ops[0].get_quantizer("backward", 0).scale.item()
    assert last == 57344 / (2 if reduce else rank + 1), last
    with te.autocast(enabled=False):
        pass
    assert len(calls) == (4 * once if reduce else 0)
    dist.destroy_process_group()
    print("good")
"""


@pytest.mark.parametrize("reduce", [True, False])
def test_two_processes_compare_and_share_amax(tmp_path, reduce, device) -> None:
    script = textwrap.dedent(PROCESSES)
    arguments = [str(tmp_path / "store"), str(reduce), device]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in running]
    for out, err in outputs:
        assert out.strip() == "good", err[-3000:]
