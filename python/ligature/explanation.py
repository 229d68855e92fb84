"""What a fuser does and why, as text, as data and as a picture; and fusions that must fire."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from . import _C
from ._arguments import listed

__all__ = ["Explanation", "PlanDiff", "explain", "strict"]


class PlanDiff:
    """What differs between two plans. True when something does; ``str()`` shows it."""

    def __init__(self, diff: _C.PlanDiff) -> None:
        self._diff = diff

    def __bool__(self) -> bool:
        return self._diff.differs

    def __str__(self) -> str:
        return self._diff.text()

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        result: dict[str, Any] = json.loads(self._diff.json(-1))
        return result


class Explanation:
    """The forward and backward plans of one or several fusers.

    ``print`` it, or ask for :meth:`to_dict`, :meth:`to_json` or :meth:`svg`. It tells the steps of
    both directions, the basic operations each covers, the kernels it calls, the format of what
    passes between steps, what is saved for backward and how many bytes, the extra inputs, outputs
    and channels, and every fusion that was considered with the reason why it was not taken.
    """

    def __init__(self, explanation: _C.Explanation) -> None:
        self._explanation = explanation

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_svg_(self) -> str:
        return self.svg()

    def text(self) -> str:
        """For people, in a terminal."""
        return self._explanation.text()

    def to_json(self, indent: int | None = None) -> str:
        """For programs, as JSON."""
        return self._explanation.json(-1 if indent is None else indent)

    def to_dict(self) -> dict[str, Any]:
        """For programs, as plain data."""
        result: dict[str, Any] = json.loads(self.to_json())
        return result

    def svg(self) -> str:
        """A picture that stands by itself."""
        return self._explanation.svg()

    def save(self, path: str | Path) -> None:
        """Writes a file in the form that its name asks for: .svg, .json or .txt."""
        path = Path(path)
        forms = {".svg": self.svg, ".json": lambda: self.to_json(indent=2), ".txt": self.text}
        if path.suffix not in forms:
            raise ValueError(f"explain: a file must end in .svg, .json or .txt, got {path.name!r}")
        path.write_text(forms[path.suffix](), encoding="utf-8")

    @property
    def parts(self) -> list[dict[str, Any]]:
        """One entry per fuser, and per module between fusers, as in :meth:`to_dict`."""
        parts: list[dict[str, Any]] = self.to_dict()["parts"]
        return parts

    @property
    def saved_bytes(self) -> int:
        """What is kept for backward besides inputs and parameters."""
        return self._explanation.saved_bytes

    @property
    def fusions(self) -> list[str]:
        """Names of the fused operations that run, forward and backward, each once."""
        return self._explanation.fusions

    def diff(self, other: Explanation) -> PlanDiff:
        """What differs from here to another plan."""
        if not isinstance(other, Explanation):
            raise TypeError(f"diff: wanted an Explanation, got {type(other).__name__}")
        return PlanDiff(self._explanation.diff(other._explanation))


def _example_tensor(example: Any, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    if isinstance(example, torch.Tensor):
        return example
    if not isinstance(example, Sequence) or not all(isinstance(n, int) for n in example):
        raise TypeError(
            f"explain: an example is a tensor or a shape, got {type(example).__name__} {example!r}"
        )
    dtypes = [p.dtype for p in parameters if p.dtype.is_floating_point]
    dtype = dtypes[0] if dtypes else torch.get_default_dtype()
    return torch.empty(tuple(example), dtype=dtype, device="meta").requires_grad_()


def example_tensors(module: torch.nn.Module | None, example: Sequence[Any]) -> list[torch.Tensor]:
    """Tensors for the examples given; shapes become tensors without memory that need gradients."""
    parameters = [] if module is None else list(module.parameters())
    return [_example_tensor(item, parameters) for item in example]


def _named_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Those of a model, and what an integration computes with in a module's place."""
    for name, module in model.named_modules():
        yield name, module
        instead = module.__dict__.get("_ligature")
        if isinstance(instead, torch.nn.Module):
            yield from instead.named_modules(prefix=name)


def explain(model: torch.nn.Module, *example: Any) -> Explanation:
    """Explains every ``Sequential`` (and every operation called by itself) in a model.

    It tells what the last call did. With an ``example`` the model is called once first; a
    ``Sequential`` takes shapes too and computes nothing (see ``Sequential.explain``).
    """
    from .ops.fusible import FusibleOperation
    from .ops.sequential import Sequential

    if isinstance(model, Sequential):
        return model.explain(*example)
    if example:
        with torch.random.fork_rng():
            model(*example)
    named: list[tuple[str, _C.Explanation]] = []
    covered: list[str] = []
    for name, module in _named_modules(model):
        if any(name.startswith(prefix) for prefix in covered):
            continue
        if isinstance(module, Sequential):
            covered.append(f"{name}." if name else "")
            if module._was_called():
                named.append((name, module.explain()._explanation))
            else:
                named.append((name, _C.explain_module("Sequential", "not called yet")))
        elif isinstance(module, FusibleOperation):
            covered.append(f"{name}." if name else "")
            fuser = module.__dict__.get("_own_fuser")
            if fuser is not None:
                named.append((name, fuser.explain()._explanation))
    if not named:
        raise ValueError(f"explain: no operation of Ligature was called in {type(model).__name__}")
    return Explanation(_C.join_explanations(named))


class strict:  # noqa: N801  used like a function
    """Fusions that must fire in what this thread calls inside the context.

    Args:
        *fusions: names, of fusions or of the operations they make.
        where: ``"every"`` asks each fuser that is called inside for all of them, when it plans;
            ``"any"`` asks for each fusion in one fuser at least, at the end.

    An expected fusion that does not fire raises RuntimeError with the reason. Fusions of the
    backward pass are not asked for where no backward runs. ::

        with ligature.strict("ForwardLinearBiasActivation"):
            y = mlp(x)
    """

    def __init__(self, *fusions: str | Iterable[str], where: str = "every") -> None:
        names = [name for given in fusions for name in strict_names(given)]
        if where not in ("every", "any"):
            raise ValueError(f"strict: where must be 'every' or 'any', got {where!r}")
        self._scope = _C.StrictScope(names, where == "any")

    def __enter__(self) -> strict:
        self._scope.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._scope.exit(kind is not None)


def strict_names(fusions: Iterable[str] | str) -> list[str]:
    """Checks a list of names of fusions."""
    names = (
        [fusions]
        if isinstance(fusions, str)
        else listed("strict", "fusions", "a list of names", fusions)
    )
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"strict: a fusion is named by a str, got {type(name).__name__}")
    return names
