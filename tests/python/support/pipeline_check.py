"""Runs a random pipeline with Ligature and with the reference, and compares everything."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from pipeline_case import Call, Case, Op, every_op
from pipeline_model import Given, GivenIntegers, Hooks, Model, laid_out, random_values, torch_dtype
from pipeline_ops import register
from pipeline_reference import PipelineReference, Rounding
from pipeline_unfused import Pass, Unfused, has_quantize
from quantized_reference import RECIPES, flips
from reference import TOLERANCES

import ligature as te
from ligature.common.recipe import Recipe

Tensor = torch.Tensor

#: Beyond this size a float16 run overflows; such cases are left out.
LARGEST = 2e3
#: How often, and to which side of a kink, the reference is disturbed.
ROUNDINGS = (1, -1, None, None)
#: Where they disagree, they are asked once more with so many: a value at a border of its format, or
#: one on which the result hangs by far more than its rounding, is moved in few of them only.
MANY_ROUNDINGS = 16 * ROUNDINGS


class TooLargeError(Exception):
    """The values of a case leave the range in which low precision means something."""


@dataclass
class Run:
    """One call: what the reference made of it, once exactly and then with roundings."""

    call: Call
    given: list[Given]
    copies: list[list[Tensor]]  # of what is given, per reference
    outputs: list[list[Tensor]]  # per reference
    dtypes: list[torch.dtype]
    returned: list[dict[int, list[Tensor]]]
    fused_scales: list[bool] = field(default_factory=list)  # see PipelineReference
    unfused: Pass | None = None
    got: list[Tensor] = field(default_factory=list)


def compare(
    what: str,
    got: Tensor | None,
    wanted: list[Tensor | None],
    dtype: torch.dtype,
    unfused: Tensor | None = None,
    low_precision: bool = False,
) -> None:
    """The first of ``wanted`` is exact, the others tell how far rounding may lead.

    ``unfused``: what is as good as exact.
    """
    if unfused is not None:
        what = f"{what}, unfused"
        if wanted[0] is None:
            wanted = [torch.zeros_like(unfused)]
    exact = wanted[0] if unfused is None else unfused
    if got is None or exact is None:
        # What nothing flows into has a gradient of zeros, or none.
        empty = exact is None and (got is None or not got.any())
        assert empty, f"{what}: {got} instead of {exact}"
        return
    assert got.dtype == dtype, f"{what}: dtype {got.dtype} instead of {dtype}"
    assert got.shape == exact.shape, f"{what}: {tuple(got.shape)} instead of {tuple(exact.shape)}"
    if got.numel() == 0:
        return
    got, exact = got.detach(), exact.detach().double()
    center = wanted[0].detach()
    spread = max((float((w.detach() - center).abs().max()) for w in wanted[1:]), default=0.0)
    size = float(exact.abs().max())
    relative, absolute = TOLERANCES[dtype]
    limit = 6 * spread + relative * size + 1e-2 * absolute
    error = (got.double() - exact).abs()
    worst = float(error.max())
    if worst <= limit and low_precision:
        # Of many values a few may be on the other side of a border, not all.
        means = [float((w.detach() - center).square().mean().sqrt()) for w in wanted[1:]]
        worst = float(error.square().mean().sqrt())
        factor = 2.0 if exact.float().unique().numel() > 50 else 4.0
        limit = factor * max(means, default=0.0) + relative * size / 2 + 1e-2 * absolute
        what = f"{what}, the mean"
    if worst <= limit:
        return
    at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    raise AssertionError(
        f"{what}: {float(got[at]):.6g} instead of {float(exact[at]):.6g} at {list(at)} of "
        f"{list(got.shape)}: off by {worst:.3g}, where {limit:.3g} is allowed"
    )


# -- running


def _grads_for(call: Call, run: Run) -> list[Tensor]:
    out = []
    for k, (y, dtype) in enumerate(zip(run.got, run.dtypes, strict=True)):
        values = random_values(call.seed + 1000 + k, tuple(y.shape), dtype, call.grad_layout)
        out.append(laid_out(values, call.grad_layout, tuple(y.shape)))
    return out


@contextmanager
def _mode(case: Case, call: Call, recipe: Recipe | None) -> Iterator[None]:
    device = torch.get_default_device().type
    modes = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    with ExitStack() as stack:
        stack.enter_context(modes[call.mode]())
        if recipe is not None:
            stack.enter_context(te.autocast(recipe=recipe))
        if case.autocast:
            stack.enter_context(torch.autocast(device, dtype=torch_dtype(case.autocast)))
        yield


def dtypes_of(case: Case) -> set[str]:
    found = {case.dtype, case.autocast}
    for op in every_op(case.ops):
        found |= {op.extra[0], op.options.get("dtype", "")}
    return found - {""}


class Check:
    """One case from its data to the last comparison."""

    def __init__(self, case: Case, roundings: tuple[int | None, ...]) -> None:
        self.case = case
        self.model = Model(case)
        self.parameters = dict(self.model.root.named_parameters())
        self.hooks = Hooks(self.model)
        self.fused: Counter[str] = Counter()
        autocast = torch_dtype(case.autocast) if case.autocast else None
        data = {key: op for key, op in self.model.data.items() if isinstance(op, Op)}
        arguments = (self.model.root, data, autocast)
        self.recipe = RECIPES[case.recipe]() if case.recipe else None
        self.unfused = Unfused(case) if case.recipe else None
        #: Whether the references tell values, or only how far roundings lead.
        self.exact = self.recipe is None or not has_quantize(case)
        self.references = [PipelineReference(*arguments, recipe=self.recipe)]
        width = flips(self.recipe, torch.get_default_device()) if self.recipe else 0.0
        self.references += [
            PipelineReference(*arguments, Rounding(k, side, width), self.references[0], self.recipe)
            for k, side in enumerate(roundings)
        ]
        #: Those after the first so many compute as what is not fused does.
        self.near = len(self.references)
        if self.recipe is not None and any(op.kind == "ConstantScale" for op in every_op(case.ops)):
            unfused = PipelineReference(*arguments, recipe=self.recipe)
            self.references += [unfused] + [
                PipelineReference(*arguments, Rounding(k, side, width), unfused, self.recipe)
                for k, side in enumerate(roundings[: len(roundings) // 2])
            ]

    def run(self) -> Counter[str]:
        with ExitStack() as stack:
            runs = []
            for number, call in enumerate(self.case.calls):
                for fuse in self.case.fusions:
                    if fuse.since == number:
                        stack.enter_context(register(fuse))
                self.model.freeze(call.frozen)
                run = self._reference_forward(call)
                self._forward(run)
                runs.append(run)
                if not self.case.late:
                    self._backward(run)
            if self.case.late:
                for run in runs:
                    self._backward(run)
            self._compare_parameters()
        return self.fused

    # -- forward

    def _reference_forward(self, call: Call) -> Run:
        case = self.case
        given = [Given(call.shape, torch_dtype(case.dtype), call.layout, call.grad, call.seed)]
        run = Run(call, given, [], [], [], [])

        def new_extra(op: Op, shape: tuple[Any, ...], current: torch.dtype) -> Any:
            if callable(shape[0] if shape else None):
                make, *sizes = shape
                given.append(GivenIntegers(make, tuple(sizes), call.seed + len(given)))
                return given[-1]
            k = len(given)
            grad = call.extra_grads[k % len(call.extra_grads)]
            in_place = bool(op.options.get("in_place"))
            if in_place and grad == "leaf":
                grad = "computed"  # the check looks at what became of its history
            dtype = torch_dtype(op.extra[0]) if op.extra[0] else current
            given.append(Given(shape, dtype, op.extra[1], grad, call.seed + k, in_place))
            return given[-1]

        for number, reference in enumerate(self.references):
            for name, parameter in self.parameters.items():
                reference.parameters[name].requires_grad_(parameter.requires_grad)
            copies = [given[0].copy()]
            run.copies.append(copies)

            def extra(
                op: Op, shape: Any, dtype: torch.dtype, copies: list[Tensor] = copies
            ) -> tuple[Tensor, torch.dtype]:
                known = len(copies) < len(given)
                item = given[len(copies)] if known else new_extra(op, shape, dtype)
                copies.append(item.copy())
                return copies[-1], item.dtype

            with nullcontext() if call.mode == "grad" else torch.no_grad():
                fused_scales = run.fused_scales if number < self.near else ()
                outputs, returned = reference.run(copies[0], given[0].dtype, extra, fused_scales)
            reference.end_forward()
            run.outputs.append([tensor for tensor, _ in outputs])
            run.dtypes = [dtype for _, dtype in outputs]
            run.returned.append(returned)
        self._check_size()
        return run

    def _check_size(self) -> None:
        if self.references[0].largest.value > LARGEST and "float16" in dtypes_of(self.case):
            raise TooLargeError

    def _forward(self, run: Run) -> None:
        versions = {name: p._version for name, p in self.parameters.items()}
        before = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.hooks.clear()
        mode = partial(_mode, self.case, run.call, self.recipe)
        if self.unfused is not None:
            run.unfused = self.unfused.forward(run.call, run.given, mode)
        with mode(), warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            result = self.model.call(*(item.passed for item in run.given))
        run.got = list(result) if isinstance(result, tuple) else [result]
        self._count_fused()
        run.fused_scales += self.model.fused_scales()
        for name, parameter in self.parameters.items():
            assert torch.equal(parameter, before[name]), f"{name} was changed by forward"
            assert parameter._version == versions[name], f"{name} counts as changed by forward"
        assert len(run.got) == len(run.dtypes), f"{len(run.got)} results, not {len(run.dtypes)}"
        for k, (got, dtype) in enumerate(zip(run.got, run.dtypes, strict=True)):
            wanted = [outputs[k] for outputs in run.outputs]
            self._compare(f"output {k}", got, wanted, dtype)
            if run.unfused is not None:
                compare(f"output {k}", got, wanted, dtype, run.unfused.outputs[k], True)
            if run.call.mode == "grad" or not self._handed_through(run, got):
                flag = wanted[0].requires_grad
                assert got.requires_grad == flag, f"output {k}: requires_grad is not {flag}"
        for k, item in enumerate(run.given):
            if not item.in_place:
                item.check_unchanged(f"input {k}")
        self._compare_in_place(run)
        self._compare_forward_hooks(run)

    def _handed_through(self, run: Run, got: Tensor) -> bool:
        """Without gradients torch's Identity, and what is overwritten, return their argument."""
        plain = all(op.kind.startswith("torch.") for op in every_op(self.case.ops))
        return any(got is item.passed and (plain or item.in_place) for item in run.given)

    def _compare_in_place(self, run: Run) -> None:
        """What was overwritten holds what the operation returned."""
        ops = [op for op in self._visited() for _ in range(self._taken_from_caller(op))]
        visits: Counter[int] = Counter()
        for module, item in zip(ops, run.given[1:], strict=True):
            at = visits[id(module)]
            visits[id(module)] += 1
            if item.in_place:
                wanted = [returned[id(module)][at] for returned in run.returned]
                self._compare("what in_place wrote to", item.passed.detach(), wanted, item.dtype)

    def _visited(self) -> Iterator[torch.nn.Module]:
        def walk(module: Any) -> Iterator[torch.nn.Module]:
            if isinstance(module, (te.ops.Sequential, torch.nn.Sequential)):
                for child in module:
                    yield from walk(child)
            else:
                yield module

        return walk(self.model.root)

    def _taken_from_caller(self, module: torch.nn.Module) -> int:
        """How many extra inputs."""
        return 0 if self.model.data[id(module)].takes else getattr(module, "num_extra_inputs", 0)

    def _compare_forward_hooks(self, run: Run) -> None:
        for (module, kind), seen in self.hooks.seen.items():
            if not kind.startswith("forward"):
                continue
            visits = [returned[module] for returned in run.returned]
            assert len(seen) == len(visits[0]), f"{kind} hook ran {len(seen)} times"
            for at, got in enumerate(seen) if kind == "forward" else ():
                wanted = [values[at] for values in visits]
                self._compare("what a forward hook saw", got, wanted, got.dtype)

    def _count_fused(self) -> None:
        for module in self.model.root.modules():
            groups = getattr(module, "_module_groups", None) or []
            fusers = [group for group in groups if isinstance(group, te.ops.OperationFuser)]
            if self.case.fuser and module is self.model.root:
                fusers = [self.model.call]
            for fuser in fusers:
                for op, _ in [*fuser._forward_ops, *fuser._backward_ops]:
                    if op.is_fused_op:
                        self.fused[type(op).__name__] += 1

    # -- backward

    def _backward(self, run: Run) -> None:
        call = run.call
        if call.mode != "grad":
            return
        used = [k for k, y in enumerate(run.got) if y.requires_grad and k not in call.unused]
        if not used:
            return
        self.hooks.clear()
        grads = _grads_for(call, run)
        if call.backward == "some":
            self._some_gradients(run, used, grads)
            return
        times = 2 if call.backward == "twice" else 1
        for last in range(1, times + 1):
            keep = last < times
            fresh = [grads[k].clone() for k in used]
            self._run_backward([run.got[k] for k in used], fresh, keep)
            self._check_grads_unchanged(fresh, [grads[k] for k in used])
            wide = [grads[k].double() for k in used]
            for reference, outputs in zip(self.references, run.outputs, strict=True):
                self._run_backward([outputs[k] for k in used], wide, keep)
                reference.end_backward()
            if run.unfused is not None:
                fresh = [grads[k].clone() for k in used]
                self._run_backward([run.unfused.outputs[k] for k in used], fresh, keep)
        self._check_size()
        for k, item in enumerate(run.given):
            if item.grad == "none":
                continue
            wanted = [copies[k].grad for copies in run.copies]
            self._compare(f"gradient of input {k}", item.leaf.grad, wanted, item.dtype)
            if run.unfused is not None and item.leaf.grad is not None:
                other = run.unfused.given[k].leaf.grad
                compare(f"gradient of input {k}", item.leaf.grad, wanted, item.dtype, other, True)
        self._compare_backward_hooks(run, times)

    def _run_backward(self, outputs: list[Tensor], grads: list[Tensor], keep: bool) -> None:
        """Under a recipe each with the same random numbers."""
        if self.recipe is not None:
            torch.manual_seed(17)
        torch.autograd.backward(outputs, grads, retain_graph=keep)

    def _compare(self, what: str, got: Any, wanted: list[Any], dtype: torch.dtype) -> None:
        wanted = wanted[: self.near]
        if self.exact or got is None or wanted[0] is None:
            compare(what, got, wanted, dtype, low_precision=self.recipe is not None)
            return
        assert got.dtype == dtype, f"{what}: dtype {got.dtype} instead of {dtype}"
        assert got.shape == wanted[0].shape, f"{what}: {tuple(got.shape)}"

    def _some_gradients(self, run: Run, used: list[int], grads: list[Tensor]) -> None:
        """Asks for the gradients of some leaves only."""
        leaves = [
            (f"input {k}", item.leaf, [copies[k] for copies in run.copies])
            for k, item in enumerate(run.given)
            if item.grad != "none"
        ]
        leaves += [
            (name, parameter, [reference.parameters[name] for reference in self.references])
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        ]
        asked = [item for k, item in enumerate(leaves) if run.call.seed >> (k % 16) & 1]
        if not asked:
            return
        got = torch.autograd.grad(
            [run.got[k] for k in used],
            [leaf for _, leaf, _ in asked],
            [grads[k].clone() for k in used],
            allow_unused=True,
        )
        wanted = [
            torch.autograd.grad(
                [outputs[k] for k in used],
                [copies[at] for _, _, copies in asked],
                [grads[k].double() for k in used],
                allow_unused=True,
            )
            for at, outputs in enumerate(run.outputs)
        ]
        self._check_size()
        for at, (name, leaf, _) in enumerate(asked):
            values = [results[at] for results in wanted]
            compare(f"gradient of {name}", got[at], values, leaf.dtype)

    def _check_grads_unchanged(self, after: list[Tensor], before: list[Tensor]) -> None:
        forks = [op for op in every_op(self.case.ops) if op.kind == "MakeExtraOutput"]
        if any(op.options.get("in_place") for op in forks):
            return
        for a, b in zip(after, before, strict=True):
            assert torch.equal(a, b), "backward changed a gradient that it was given"

    def _compare_backward_hooks(self, run: Run, times: int) -> None:
        for (module, kind), seen in self.hooks.seen.items():
            if not kind.startswith("backward"):
                continue
            visits = [returned[module] for returned in run.returned]
            flows = sum(value.grad is not None for value in visits[0])
            low, high = times * flows, times * len(visits[0])
            assert low <= len(seen) <= high, f"{kind} hook ran {len(seen)} times, not {low}"
            if len(seen) == 1 == flows == len(visits[0]) and seen[0] is not None:
                wanted = [values[0].grad for values in visits]
                self._compare(f"what a {kind} hook saw", seen[0], wanted, seen[0].dtype)

    def _compare_parameters(self) -> None:
        main_grads = {id(parameter) for parameter in self.model.main_grads()}
        for name, parameter in self.parameters.items():
            wanted = [reference.parameters[name].grad for reference in self.references]
            got = parameter.grad
            if id(parameter) in main_grads:
                assert got is None, f"{name} has a gradient besides its main_grad"
                got = parameter.main_grad
            dtype = parameter.dtype if got is None else got.dtype
            self._compare(f"gradient of {name}", got, wanted, dtype)
            if self.unfused is not None and got is not None:
                twin = self.unfused.parameters[name]
                other = twin.main_grad if id(parameter) in main_grads else twin.grad
                compare(f"gradient of {name}", got, wanted, dtype, other, True)
            if got is not None and id(parameter) not in main_grads:
                assert got.dtype == parameter.dtype, f"gradient of {name}: dtype {got.dtype}"


def _first_roundings(case: Case) -> tuple[int | None, ...]:
    if case.recipe:
        return 2 * ROUNDINGS
    return () if dtypes_of(case) == {"float64"} else ROUNDINGS


def check(case: Case) -> Counter[str]:
    """Raises an AssertionError that says what differs; returns the fused operations that ran."""
    try:
        return Check(case, _first_roundings(case)).run()
    except AssertionError:
        return Check(case, MANY_ROUNDINGS).run()
