"""Explanations against what really runs: hooks on saved tensors, the profiler, real outputs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from custom_support import ClassicScale, SplitScale
from fusion_support import saved_bytes

import ligature as te

ops = te.ops


def residual_block(recompute: str = "none", **kwargs: Any) -> te.ops.Sequential:
    start, end = ops.MakeExtraOutput(), ops.AddExtraInput()
    start.set_extra_output_channel(0, "residual", output_to_caller=False)
    end.set_extra_input_channel(0, "residual")
    return ops.Sequential(
        start,
        ops.RMSNorm(16, **kwargs),
        ops.Linear(16, 64, **kwargs),
        ops.SwiGLU(),
        ops.Linear(32, 16, **kwargs),
        end,
        recompute=recompute,
    )


def branches() -> te.ops.Sequential:
    return ops.Sequential(
        ops.AddExtraInput(),
        ops.MakeExtraOutput(),
        ops.Linear(16, 16),
        ops.ConstantScale(0.5),
        ops.AddExtraInput(),
        ops.ScaledSwiGLU(),
    )


def mlp(**kwargs: Any) -> te.ops.Sequential:
    return ops.Sequential(
        ops.LayerNorm(16, **kwargs),
        ops.Linear(16, 32, **kwargs),
        ops.GELU(),
        ops.Dropout(0.25),
        ops.Linear(32, 8, bias=False, **kwargs),
    )


MODELS: dict[str, tuple[Callable[[], te.ops.Sequential], list[tuple[int, ...]]]] = {
    "mlp": (mlp, [(4, 16)]),
    "mlp in bfloat16": (lambda: mlp(dtype=torch.bfloat16), [(2, 3, 16)]),
    "residual": (residual_block, [(5, 16)]),
    "recomputed": (lambda: residual_block("cheap"), [(5, 16)]),
    "branches": (branches, [(4, 16), (4, 16), (4, 16), (4,)]),
    "classic guest": (lambda: ops.Sequential(ops.Linear(16, 8), ClassicScale()), [(4, 16)]),
    "split guest": (lambda: ops.Sequential(ops.RMSNorm(16), SplitScale(), ops.SiLU()), [(4, 16)]),
}


def inputs_for(model: torch.nn.Module, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    dtypes = [p.dtype for p in model.parameters()] or [torch.float32]
    return [torch.randn(shape, dtype=dtypes[0]).requires_grad_() for shape in shapes]


def run(model: torch.nn.Module, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    outputs = model(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    used = [y for y in outputs if y.requires_grad]
    torch.autograd.backward(used, [torch.ones_like(y) for y in used])
    return outputs


def aten_calls(explanation: te.Explanation, *names: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for part in explanation.parts:
        for step in part.get("forward", []) + part.get("backward", []):
            for kernel in step["kernels"]:
                found.update(c for c in [kernel["name"], *kernel["calls"]] if c in names)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_before_and_after_a_call_agree(name: str) -> None:
    make, shapes = MODELS[name]
    model = make()
    before = model.explain(*shapes)
    by_tensor = model.explain(*inputs_for(model, shapes))
    run(model, inputs_for(model, shapes))
    after = model.explain()
    assert str(before) == str(after)
    assert str(by_tensor) == str(after)
    assert before.to_dict() == after.to_dict()
    assert not before.diff(after)


@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_are_those_that_autograd_holds(name: str) -> None:
    make, shapes = MODELS[name]
    model = make()
    inputs = inputs_for(model, shapes)
    assert model.explain(*shapes).saved_bytes == saved_bytes(model, *inputs)
    inputs[0].requires_grad_(False)
    explained = model.explain(*inputs)
    assert explained.saved_bytes == saved_bytes(model, *inputs)
    part = explained.parts[0]
    assert part["saved_bytes"] == sum(step["saved_bytes"] for step in part["forward"])
    counted = [s for step in part["forward"] for s in step["saved"] if s["counted"]]
    assert part["saved_bytes"] == sum(s["bytes"] for s in counted)


@pytest.mark.parametrize("name", ["mlp", "residual", "recomputed", "branches"])
def test_matrix_products_are_those_that_the_profiler_sees(name: str) -> None:
    make, shapes = MODELS[name]
    model = make()
    inputs = inputs_for(model, shapes)
    run(model, inputs)
    products = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::native_dropout")
    with torch.profiler.profile() as profile:
        run(model, [*inputs])
    seen = Counter(e.name for e in profile.events() if e.name in products)
    wanted = aten_calls(model.explain(), *products)
    assert seen == wanted


@pytest.mark.parametrize("autocast", [False, True])
def test_formats_between_steps_are_those_of_real_outputs(autocast: bool, device: str) -> None:
    model = ops.Sequential(
        ops.LayerNorm(16), ops.Linear(16, 32), ops.SwiGLU(), ops.ConstantScale(2.0), ops.ReLU()
    )
    x = torch.randn(3, 16)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        model(x)
        part = model.explain().parts[0]
        assert part["situation"]["autocast"] == ("bfloat16" if autocast else None)
        ends = {"LayerNorm": 1, "ForwardLinearBiasActivation": 3, "ConstantScale": 4, "ReLU": 5}
        for step in part["forward"]:
            y = model[: ends[step["op"]]](x)
            assert step["output"]["shape"] == list(y.shape)
            assert step["output"]["dtype"] == str(y.dtype).removeprefix("torch.")
    outside = model.explain().parts[0]  # of the last call, wherever it is asked
    assert outside["forward"] == part["forward"]


def test_nothing_is_computed_and_nothing_changes() -> None:
    model = ops.Sequential(
        ops.LayerNorm(4096),
        ops.Dropout(0.5),
        ops.Linear(4096, 4096, accumulate_into_main_grad=True),
    )
    weight = model[2].weight
    weight.main_grad = torch.zeros_like(weight)
    state = torch.get_rng_state()
    versions = [p._version for p in model.parameters()]
    explanation = model.explain((1 << 40, 4096))
    assert explanation.saved_bytes > 1 << 52
    assert torch.equal(torch.get_rng_state(), state)
    assert [p._version for p in model.parameters()] == versions
    assert all(p.grad is None for p in model.parameters())
    assert not weight.main_grad.any()
    assert model._module_groups[0]._forward_ops is None  # still no call
    with pytest.raises(RuntimeError, match="have not been called yet"):
        model.explain()


def test_the_situation() -> None:
    model = mlp()
    x = torch.randn(2, 16)
    with torch.no_grad():
        model(x)
    situation = model.explain().parts[0]["situation"]
    assert situation["gradients"] is False
    assert situation["input"]["requires_grad"] is False
    assert "no gradients" in str(model.explain())
    assert model.explain().saved_bytes == 0
    model.eval()
    model[0].requires_grad_(False)
    model(x)
    part = model.explain().parts[0]
    assert part["situation"]["gradients"] is True
    assert part["situation"]["training"] is False
    assert [op["runs_in_backward"] for op in part["ops"]] == [False, *[True] * 5]
    assert "takes no part in backward" in str(model.explain())
    with torch.inference_mode():
        assert model.explain().parts[0]["situation"]["gradients"] is True
        model(x)
    assert model.explain().parts[0]["situation"]["gradients"] is False


def test_strides_of_the_last_call_are_known() -> None:
    model = ops.Sequential(ops.GELU())
    model(torch.randn(8, 4).t())
    assert aten_calls(model.explain(), "aten::clone") == {"aten::clone": 1}
    model(torch.randn(4, 8))
    assert not aten_calls(model.explain(), "aten::clone")


def test_branches_and_channels() -> None:
    part = residual_block().explain((2, 16)).parts[0]
    assert part["ops"][0]["extra_outputs"] == [{"channel": "residual", "caller": None, "ops": [7]}]
    assert part["ops"][7]["extra_inputs"] == [{"channel": "residual", "caller": None, "op": 0}]
    part = branches().explain((2, 16), (2, 16), (2, 16), (2,)).parts[0]
    assert part["ops"][0]["extra_inputs"] == [{"channel": None, "caller": 0, "op": None}]
    assert part["ops"][1]["extra_outputs"] == [{"channel": None, "caller": 0, "ops": []}]
    assert [i["shape"] for i in part["situation"]["extra_inputs"]] == [[2, 16], [2, 16], [2]]


def test_fusions_considered_with_reasons() -> None:
    explanation = mlp().explain((2, 16))
    found = {(c["pass"], c["fusion"], c["position"]): c for c in explanation.parts[0]["considered"]}
    taken = found["forward", "ForwardLinearBiasActivation", 1]
    assert taken["taken"]
    assert taken["ops"] == ["BasicLinear", "Bias", "GELU"]
    assert taken["reason"] is None
    missed = found["forward", "ForwardLinearBiasAdd", 1]
    assert not missed["taken"]
    assert missed["reason"] == "wanted AddExtraInput, found GELU"
    assert explanation.fusions == ["ForwardLinearBiasActivation", "BackwardActivationBias"]
    frozen = mlp()
    frozen[0].requires_grad_(False)
    frozen(torch.randn(2, 16))
    positions = {
        c["fusion"]: c["position"] for c in frozen.explain().parts[0]["considered"] if c["taken"]
    }
    assert positions["BackwardActivationBias"] == 2


def test_functions_are_listed_with_what_they_covered() -> None:
    class Both(ops.FusedOperation):
        pass

    def fuse(given: list[Any], **unused: Any) -> list[Any]:
        return [given[0], Both([given[1], given[2]]), *given[3:]]

    model = ops.Sequential(ops.SiLU(), ops.ConstantScale(2.0), ops.SiLU())
    with ops.register_backward_fusion(fuse):
        part = model.explain(torch.randn(2).requires_grad_(False)).parts[0]
        assert not any(c["fusion"] == "fuse" for c in part["considered"])  # no backward
        fuser = ops.OperationFuser(list(model))
        x = torch.randn(2, requires_grad=True)
        with pytest.raises(AttributeError):
            fuser.explain(x)  # it runs, and has no backward
        fuser(x)
    explanation = fuser.explain()  # of the plan that ran, whatever is registered now
    part = explanation.parts[0]
    considered = [c for c in part["considered"] if c["fusion"] == "fuse"]
    assert [(c["position"], c["ops"], c["taken"]) for c in considered] == [
        (1, ["ConstantScale", "SiLU"], True)
    ]
    assert part["backward"][1]["ran"] is False
    assert "not run in the traced call" in str(explanation)


def test_guests_are_named() -> None:
    model = ops.Sequential(ops.Linear(16, 8), ClassicScale())
    part = model.explain((2, 16)).parts[0]
    assert part["forward"][-1]["kernels"] == [
        {"name": "ClassicScale", "backend": "python", "calls": []}
    ]
    assert part["forward"][-1]["python"] is True
    model(torch.randn(2, 16))  # no backward yet
    part = model.explain().parts[0]
    assert [step["ran"] for step in part["backward"]] == [False] * 3
    assert [step["ran"] for step in part["forward"]] == [True] * 2


def test_several_fusers_other_modules_and_nesting() -> None:
    model = ops.Sequential(
        ops.Linear(16, 8),
        torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)),
        ops.Sequential(ops.SiLU(), torch.nn.Tanh(), ops.Identity()),
    )
    before = model.explain((3, 16))
    names = ["0", "1", "2.0", "2.1", "2.2"]
    assert [part["name"] for part in before.parts] == names
    assert [part["kind"] for part in before.parts] == [
        "fuser", "module", "fuser", "module", "fuser"
    ]  # fmt: skip
    assert before.parts[2]["situation"]["input"]["shape"] == [3, 4]
    assert before.parts[2]["situation"]["input"]["requires_grad"] is True
    assert model[1][1].num_batches_tracked == 0
    model(torch.randn(3, 16, requires_grad=True))
    assert str(model.explain()) == str(before)
    assert before.parts[1]["module"] == "Sequential"


def test_hooks_keep_an_operation_by_itself() -> None:
    model = residual_block()
    calls = []
    model[3].register_forward_hook(lambda *args: calls.append(1))
    before = model.explain((2, 16))
    assert len(before.parts) == 3
    assert not calls
    model(torch.randn(2, 16, requires_grad=True))
    assert len(calls) == 1
    assert str(model.explain()) == str(before)


def test_a_whole_model() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(7, 16)
            self.blocks = torch.nn.ModuleList([residual_block(), residual_block("cheap")])
            self.norm = ops.RMSNorm(16)
            self.unused = ops.Sequential(ops.SiLU())

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.norm(x)

    model = Model()
    with pytest.raises(ValueError, match="no operation of Ligature was called in Linear"):
        te.explain(torch.nn.Linear(2, 2))
    state = torch.get_rng_state()
    explanation = te.explain(model, torch.tensor([[1, 2, 3]]))
    assert torch.equal(torch.get_rng_state(), state)
    parts = {part["name"]: part for part in explanation.parts}
    assert list(parts) == ["blocks.0", "blocks.1", "norm", "unused"]
    assert parts["unused"]["note"] == "not called yet"
    assert parts["blocks.1"]["forward"][0]["op"] == "DenseMLP"
    single = model.blocks[0].explain().saved_bytes
    assert explanation.saved_bytes > single > parts["blocks.1"]["saved_bytes"]
    difference = str(model.blocks[0].explain().diff(model.blocks[1].explain()))
    assert "+ recompute cheap" in difference
    assert "DenseMLP with residual at 0 is not in the first plan: recompute" in difference
    assert te.explain(model.blocks[0], (2, 16)).parts[0]["name"] == ""


def test_diff() -> None:
    fused, plain = ops.OperationFuser(list(mlp())), ops.OperationFuser(list(mlp()), fuse=False)
    a, b = fused.explain((2, 16)), plain.explain((2, 16))
    assert not a.diff(a)
    assert str(a.diff(a)) == "the plans are the same\n"
    difference = a.diff(b)
    assert difference
    lines = str(difference).splitlines()
    removed = [line.strip() for line in lines if line.startswith("  - ")]
    assert any(line.startswith("- ForwardLinearBiasActivation = ") for line in removed)
    assert any("not in the second plan: it was not tried there" in line for line in lines)
    data = difference.to_dict()
    assert data["differs"] is True
    signs = {line["sign"] for line in data["parts"][0]["forward"]}
    assert signs == {" ", "-", "+"}
    other_shape = fused.explain((3, 16))
    assert "+ input float32 [3, 16] on cpu" in str(a.diff(other_shape)).replace("cuda:0", "cpu")
    with pytest.raises(TypeError, match="wanted an Explanation, got str"):
        a.diff("x")


@pytest.mark.parametrize("name", MODELS)
def test_data_and_picture_are_well_formed(name: str, tmp_path: Path) -> None:
    make, shapes = MODELS[name]
    explanation = make().explain(*shapes)
    assert json.loads(explanation.to_json(indent=2)) == explanation.to_dict()
    assert "\n" not in explanation.to_json()
    svg = explanation.svg()
    root = ElementTree.fromstring(svg)
    width, height = (float(root.attrib[k]) for k in ("width", "height"))
    shown = " ".join(root.itertext())
    for part in explanation.parts:
        for step in part["forward"] + part["backward"]:
            assert step["op"] in shown
    for element in root.iter():
        x, y = float(element.attrib.get("x", 0)), float(element.attrib.get("y", 0))
        assert 0 <= x <= width
        assert 0 <= y <= height
    assert "href" not in svg
    assert "<script" not in svg
    for suffix, text in ((".svg", svg), (".txt", str(explanation))):
        explanation.save(tmp_path / f"plan{suffix}")
        assert (tmp_path / f"plan{suffix}").read_text(encoding="utf-8") == text
    explanation.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text()) == explanation.to_dict()
    with pytest.raises(ValueError, match=r"must end in .svg, .json or .txt, got 'plan.png'"):
        explanation.save(tmp_path / "plan.png")


def test_names_are_escaped() -> None:
    odd = type('A<b>&"c', (ClassicScale,), {})
    explanation = ops.Sequential(odd()).explain((2,))
    assert 'A<b>&"c' in " ".join(ElementTree.fromstring(explanation.svg()).itertext())
    assert explanation.parts[0]["ops"][0]["name"] == 'A<b>&"c'
    assert 'A<b>&"c' in str(explanation)


def test_bad_examples() -> None:
    model = branches()
    with pytest.raises(ValueError, match="takes 3 extra inputs"):
        model.explain((2, 16))
    with pytest.raises(TypeError, match="an example is a tensor or a shape, got str"):
        model.explain("x")
    with pytest.raises(ValueError, match="trailing dimensions must be normalized_shape"):
        mlp().explain((2, 15))

    class Reads(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.sum().item()

    model = ops.Sequential(ops.SiLU(), Reads())
    with pytest.raises(RuntimeError, match="Reads does not run on tensors without memory"):
        model.explain((2,))
    model(torch.ones(2))
    assert model.explain().parts[1]["module"] == "Reads"


def test_hooks_on_saved_tensors_do_not_see_an_explanation() -> None:
    model = mlp()
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t), lambda t: t):
        model.explain((2, 16))
    assert not seen
