"""Checks of fusions and operations, for tests.

:func:`check_fusion` compares what a fusion makes with its basic operations run one by one;
:func:`check_operation` compares an operation with a formula. Both also look for what a comparison
of results does not show: outputs that share memory with inputs, arguments that are changed, state
kept between calls, saved tensors that are forgotten or spoiled, gradients that are missing or of a
wrong kind. They raise an ``AssertionError`` that names each case that failed, and return a
:class:`Report` when all is well.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from . import _C
from ._arguments import default_device
from .ops._composite import asking_for_composites
from .ops.fuser import Fusion
from .ops.fusible import FusibleOperation
from .quantization.recipe import Recipe

__all__ = ["DTYPES", "Report", "check_fusion", "check_operation"]

Report = _C.Report

#: The dtypes that are tried unless others are given.
DTYPES: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16)

Shape = Sequence[int]
#: A dtype, or that of the input and that of the parameters.
Dtypes = torch.dtype | tuple[torch.dtype, torch.dtype]

_KINDS = ("joint", "forward", "backward")


def check_fusion(
    fusion: Fusion | Callable[..., Any] | str,
    make_ops: Callable[..., Any] | Iterable[FusibleOperation],
    shapes: Shape | Sequence[Shape],
    *,
    kind: str | None = None,
    extra_shapes: Sequence[Any] | None = None,
    dtypes: Sequence[Dtypes] | None = None,
    device: torch.device | str | None = None,
    max_patterns: int = 16,
    tolerance: float = 1.0,
    contexts: str = "exact",
    recompute: str = "cheap",
    autocast: torch.dtype | None = None,
    recipe: Recipe | None = None,
    may_alias: bool = False,
    may_give_unneeded: bool = False,
    randomize_parameters: bool = True,
    sample: Callable[[tuple[int, ...]], torch.Tensor] | None = None,
    seed: int = 0,
) -> Report:
    """Verifies that a fusion computes what its basic operations compute.

    Over dtypes, shapes, and choices of which inputs and parameters need gradients it compares
    outputs, extra outputs and all gradients. A ``"forward"`` fusion runs with the unfused backward,
    and the contexts it leaves are compared too; a ``"backward"`` one runs after the unfused
    forward; a ``"joint"`` one is compared as a pair. ::

        fusion = te.ops.Fusion([te.ops.BasicLinear, te.ops.SiLU], MyLinearSiLU)

        def test_linear_silu():
            check_fusion(
                fusion,
                lambda dtype, device: [
                    te.ops.Linear(8, 16, bias=False, dtype=dtype, device=device),
                    te.ops.SiLU(),
                ],
                [(5, 8), (2, 3, 8)],
                kind="forward",
            )

        def test_a_built_in_one():
            check_fusion("BackwardActivationBias", [te.ops.Bias(8), te.ops.GELU()], (5, 8))

    Args:
        fusion: a :class:`ligature.ops.Fusion`, a function ``f(ops, recipe=...) -> ops``, or the
            name of a registered fusion.
        make_ops: makes fresh operations, given ``dtype`` and ``device`` (as far as it takes them);
            or operations, which are copied and converted. Composites stand for their parts.
        shapes: of the input; one or several. Other values and another shape between forward and
            backward show state, so give two.
        kind: ``"forward"``, ``"backward"`` or ``"joint"``; found out for a registered fusion.
        extra_shapes: for each shape, the shapes of the extra inputs. Left out, they are worked out
            where the operations tell them.
        dtypes: to try; a pair is the dtype of the input and that of the parameters. By default
            :data:`DTYPES`, under a recipe without float64.
        device: as operations are made on it by default.
        max_patterns: how many choices of what needs gradients are tried, at most.
        tolerance: a factor of the tolerances.
        contexts: ``"exact"`` wants the saved tensors and plain attributes that the basic operations
            leave, ``"enough"`` allows others besides and attributes that are missing.
        recompute: what joint fusions may do, as for :class:`ligature.ops.Sequential`.
        autocast: runs everything under ``torch.autocast`` to this dtype.
        recipe: runs everything in low precision. A fusion may quantize a value before the step that
            its basic operations quantize it after, so results may differ as far as the formats
            round.
        may_alias: outputs may share memory with inputs where those of the basic operations do not.
        may_give_unneeded: backward may give gradients that nobody needs.
        randomize_parameters: adds noise to the parameters; zeros and ones hide mistakes.
        sample: gives the values of an input of this shape; standard normal ones without it.
        seed: of all random numbers. Those of torch are left as they were.

    Raises:
        AssertionError: it is not proven; the text names dtype, shape, what needs gradients, what is
            wrong and by how much.
    """
    if isinstance(fusion, str):
        form: tuple[Any, ...] = ("name", fusion)
        kind = kind or _kind_of(fusion)
    elif isinstance(fusion, Fusion):
        form = ("rule", *fusion._as_rule())
    elif callable(fusion):
        name = getattr(fusion, "__name__", type(fusion).__name__)
        form = ("function", name, asking_for_composites(fusion))
    else:
        raise TypeError(f"a fusion is a function, a Fusion or a name, got {type(fusion).__name__}")
    if kind not in _KINDS:
        raise ValueError(f"kind must be 'forward', 'backward' or 'joint', got {kind!r}")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a Recipe, got {type(recipe).__name__}")
    if dtypes is None:
        dtypes = DTYPES if recipe is None else DTYPES[1:]
    options = _options(
        dtypes=dtypes,
        device=device,
        max_patterns=max_patterns,
        tolerance=tolerance,
        exact_contexts=_one_of("contexts", contexts, "enough", "exact"),
        recompute=_one_of("recompute", recompute, "none", "cheap"),
        autocast=autocast,
        may_alias=may_alias,
        may_give_unneeded=may_give_unneeded,
        randomize_parameters=randomize_parameters,
        sample=sample,
        seed=seed,
    )
    if recipe is not None:
        options["recipe"] = recipe._native
    examples = _examples(shapes, extra_shapes)
    return _proven(_C.check_fusion(kind, form, _maker(make_ops), examples, options))


def check_operation(
    make_op: Callable[..., Any] | FusibleOperation,
    reference: Callable[..., Any],
    shapes: Shape | Sequence[Shape],
    *,
    extra_shapes: Sequence[Any] | None = None,
    dtypes: Sequence[Dtypes] = DTYPES,
    device: torch.device | str | None = None,
    max_patterns: int = 16,
    tolerance: float = 1.0,
    numeric: bool = True,
    autocast: torch.dtype | None = None,
    may_alias: bool = False,
    may_give_unneeded: bool = False,
    may_change_gradients: bool = False,
    may_change_dtype: bool = False,
    randomize_parameters: bool = True,
    sample: Callable[[tuple[int, ...]], torch.Tensor] | None = None,
    seed: int = 0,
) -> Report:
    """Verifies that an operation computes what a formula says, forward and backward.

    Over dtypes, shapes, and choices of which inputs and parameters need gradients it compares the
    outputs and all gradients with those of ``reference``, computed in float64 and differentiated by
    autograd. Besides, it compares the operation's backward with differences of its forward. ::

        def reference(x, *, scale):
            return x * scale

        def test_scale():
            check_operation(MyScale(8), reference, [(5, 8), (2, 3, 8)])

    Args:
        make_op: makes a fresh operation, given ``dtype`` and ``device`` (as far as it takes them);
            or an operation, which is copied and converted.
        reference: ``reference(input, *extra_inputs, **parameters)`` returns the output, or a tuple
            of the output and the extra outputs. Where it returns its input, or a view of it, the
            operation may do so too. Dots in names of parameters become underscores.
        shapes, extra_shapes, dtypes, device, max_patterns, tolerance, autocast: as for
            :func:`check_fusion`, and so are randomize_parameters, sample and seed.
        numeric: whether to compare with differences, in float64.
        may_alias: outputs may share memory with inputs where the formula's do not.
        may_give_unneeded: backward may give gradients that nobody needs.
        may_change_gradients: backward may overwrite the gradients it is given.
        may_change_dtype: outputs may have another dtype than the input.

    Raises:
        AssertionError: it is not proven; the text names dtype, shape, what needs gradients, what is
            wrong and by how much.
    """
    options = _options(
        dtypes=dtypes,
        device=device,
        max_patterns=max_patterns,
        tolerance=tolerance,
        numeric=numeric,
        autocast=autocast,
        may_alias=may_alias,
        may_give_unneeded=may_give_unneeded,
        may_change_gradients=may_change_gradients,
        may_change_dtype=may_change_dtype,
        randomize_parameters=randomize_parameters,
        sample=sample,
        seed=seed,
    )
    examples = _examples(shapes, extra_shapes)
    return _proven(_C.check_operation(_maker(make_op), reference, examples, options))


#: What a failure says, and the argument that lets it pass: waste, not mistakes.
_HINTS = {
    "though none is needed": "may_give_unneeded=True allows gradients that nobody needs",
    "though backward does not need it": 'contexts="enough" allows to save more',
    " = nothing, wanted ": 'contexts="enough" allows to leave plain attributes out',
}


def _proven(report: Report) -> Report:
    if report:
        return report
    hints = [
        hint for text, hint in _HINTS.items() if any(text in failure for failure in report.failures)
    ]
    raise AssertionError("\n".join([report.text(), *(f"({hint})" for hint in hints)]))


def _kind_of(name: str) -> str:
    for kind in _KINDS:
        if name in _C.registered_fusions(kind):
            return kind
    known = ", ".join(f"'{n}'" for kind in _KINDS for n in _C.registered_fusions(kind))
    raise ValueError(f"there is no registered fusion named '{name}'; there are {known}")


def _one_of(what: str, given: str, no: str, yes: str) -> bool:
    if given not in (no, yes):
        raise ValueError(f"{what} must be '{yes}' or '{no}', got {given!r}")
    return given == yes


def _options(
    *,
    dtypes: Sequence[Dtypes],
    device: torch.device | str | None,
    max_patterns: int,
    exact_contexts: bool = True,
    recompute: bool = True,
    may_change_gradients: bool = False,
    may_change_dtype: bool = False,
    numeric: bool = True,
    **others: Any,
) -> dict[str, Any]:
    if max_patterns < 1:
        raise ValueError(f"max_patterns must be positive, got {max_patterns}")
    return {
        "dtypes": [d if isinstance(d, tuple) else (d, d) for d in dtypes],
        "device": default_device(device),
        "max_patterns": max_patterns,
        "exact_contexts": exact_contexts,
        "recompute": recompute,
        "may_change_gradients": may_change_gradients,
        "may_change_dtype": may_change_dtype,
        "numeric": numeric,
        **others,
    }


def _is_shape(value: Any) -> bool:
    return all(isinstance(size, int) for size in value)


def _examples(
    shapes: Any, extra_shapes: Sequence[Any] | None
) -> list[tuple[list[int], list[list[int]]]]:
    """Pairs of the shape of an input and those of its extra inputs."""
    if _is_shape(shapes) and (len(shapes) > 0 or isinstance(shapes, torch.Size | tuple)):
        shapes = [shapes]
        extra_shapes = None if extra_shapes is None else [extra_shapes]
    shapes = [list(shape) for shape in shapes]
    if extra_shapes is None:
        return [(shape, []) for shape in shapes]
    if len(extra_shapes) != len(shapes):
        raise ValueError(
            f"extra_shapes must be given for each of {len(shapes)} shapes, got {len(extra_shapes)}"
        )
    return [
        (shape, [list(extra) for extra in extras])
        for shape, extras in zip(shapes, extra_shapes, strict=True)
    ]


def _maker(given: Any) -> Callable[[torch.dtype, torch.device], list[torch.nn.Module]]:
    """What makes the operations: modules are copied, a function is told what it wants to know."""
    is_function = callable(given) and not isinstance(given, torch.nn.Module)
    wanted = _arguments_of(given) if is_function else set()

    def make(dtype: torch.dtype, device: torch.device) -> list[torch.nn.Module]:
        if is_function:
            known = {"dtype": dtype, "device": device}
            ops = given(**{name: known[name] for name in wanted})
        else:
            ops = copy.deepcopy(given if isinstance(given, torch.nn.Module) else list(given))
        made: list[torch.nn.Module] = [ops] if isinstance(ops, torch.nn.Module) else list(ops)
        for op in made:
            if not isinstance(op, FusibleOperation):
                raise TypeError(
                    f"a check is of fusible operations, got {type(op).__module__}."
                    f"{type(op).__name__}"
                )
            if "dtype" not in wanted:
                op.to(dtype=dtype)
            if "device" not in wanted:
                op.to(device=device)
        return made

    return make


def _arguments_of(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return {"dtype", "device"}
    return {p.name for p in parameters} & {"dtype", "device"}
