"""Quantized tensors as parameters, in optimizers, files and other processes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from quantized_support import CLASSES, EVERY, QUANTIZERS, make, same_bits, written

from ligature.quantization import MXFP8Tensor, NVFP4Tensor, QuantizedTensor
from ligature.quantization.tensor import _rebuild_quantized


def test_parameter() -> None:
    q = make("mx", 16, 32)
    p = torch.nn.Parameter(q)
    assert isinstance(p, torch.nn.Parameter)
    assert isinstance(p, MXFP8Tensor)
    assert p.requires_grad
    assert p._handle is q._handle
    frozen = torch.nn.Parameter(q, requires_grad=False)
    assert not frozen.requires_grad
    module = torch.nn.Linear(32, 16, bias=False)
    module.weight = p
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    x = torch.randint(-8, 8, (4, 32)).float()  # in whatever order a device adds them up
    module(x).sum().backward()
    assert torch.equal(p.grad, x.sum(0).expand(16, 32))


# -- optimizers. A plain copy takes the same steps; after each it is rounded as the format rounds.


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.01}),
    "adam amsgrad": (torch.optim.Adam, {"lr": 0.05, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.0}),
}


@CLASSES
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_optimizer_steps(kind: str, name: str, how: dict[str, Any]) -> None:
    cls, arguments = OPTIMIZERS[name]
    q = torch.nn.Parameter(make(kind, 16, 32))
    bias = torch.nn.Parameter(torch.randn(16))
    plain = torch.nn.Parameter(q.detach().dequantize())
    plain_bias = torch.nn.Parameter(bias.detach().clone())
    handle, where = q._handle, q.rowwise_data.data_ptr()
    one = cls([q, bias], **arguments, **how)
    other = cls([plain, plain_bias], **arguments, **how)
    for _ in range(3):
        grad, grad_bias = torch.randn(16, 32), torch.randn(16)
        for p in (q, plain):
            p.grad = grad.clone()
        for p in (bias, plain_bias):
            p.grad = grad_bias.clone()
        version, version_bias = q._version, bias._version
        one.step()
        other.step()
        with torch.no_grad():
            plain.copy_(written(q, plain).dequantize())
        assert torch.equal(q.detach().dequantize(), plain.detach())
        assert torch.equal(bias, plain_bias)
        assert q._version > version
        assert bias._version > version_bias
    assert q._handle is handle
    assert q.rowwise_data.data_ptr() == where
    for state, wanted in zip(one.state.values(), other.state.values(), strict=True):
        assert state.keys() == wanted.keys()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert type(value) is torch.Tensor
                assert torch.equal(value, wanted[key])


@CLASSES
@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}])
def test_weight_decay_of_adamw_is_a_write_of_its_own(kind: str, how: dict[str, Any]) -> None:
    """Unfused, AdamW first shrinks a parameter and then moves it: two writes, two roundings."""
    q = torch.nn.Parameter(make(kind, 16, 32))
    x = q.detach().dequantize()
    torch.optim.AdamW([q], lr=0.1, weight_decay=0.5, **how).zero_grad()
    q.grad = grad = torch.randn(16, 32)
    optimizer = torch.optim.AdamW([q], lr=0.1, weight_decay=0.5, **how)
    optimizer.step()
    shrunk = written(q, x * (1 - 0.1 * 0.5)).dequantize()
    moved = torch.nn.Parameter(shrunk.clone())
    moved.grad = grad
    torch.optim.AdamW([moved], lr=0.1, weight_decay=0.0, **how).step()
    wanted = written(q, moved).dequantize()
    assert torch.equal(q.detach().dequantize(), wanted)


def test_adamw_fused_writes_once() -> None:
    q = torch.nn.Parameter(make("mx", 16, 32))
    plain = torch.nn.Parameter(q.detach().dequantize())
    q.grad = torch.randn(16, 32)
    plain.grad = q.grad.clone()
    for p in (q, plain):
        torch.optim.AdamW([p], lr=0.1, weight_decay=0.5, fused=True).step()
    assert torch.equal(q.detach().dequantize(), q._quantizer.quantize(plain.detach()).dequantize())


def test_clip_grad_and_vectors() -> None:
    p = torch.nn.Parameter(make("mx", 16, 32))
    p.grad = torch.randn(16, 32)
    torch.nn.utils.clip_grad_norm_([p], 0.1)
    assert p.grad.norm().item() == pytest.approx(0.1, rel=1e-3)
    vector = torch.nn.utils.parameters_to_vector([p])
    assert torch.equal(vector, p.detach().dequantize().view(-1))
    values = torch.randn(512)
    torch.nn.utils.vector_to_parameters(values, [p])
    wanted = p._quantizer.quantize(values.view(16, 32)).dequantize()
    assert torch.equal(p.detach().dequantize(), wanted)


def test_initializers() -> None:
    p = torch.nn.Parameter(make("mx", 16, 32))
    torch.nn.init.constant_(p, 0.5)
    assert torch.equal(p.detach().dequantize(), torch.full((16, 32), 0.5))
    torch.nn.init.normal_(p)
    assert p.detach().std().item() == pytest.approx(1.0, abs=0.2)


# -- .data and modules


@EVERY
def test_data_takes_plain_values(kind: str) -> None:
    p = torch.nn.Parameter(make(kind, 16, 32))
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    wanted = written(p, x)
    p.data = x
    assert same_bits(p, wanted)
    assert p.shape == (8, 64)
    assert p.dtype == torch.bfloat16
    assert p.requires_grad


def test_data_takes_another_format() -> None:
    p = torch.nn.Parameter(make("mx", 16, 32))
    q = make("nv", 16, 32)
    p.data = q
    assert isinstance(p, NVFP4Tensor)
    assert isinstance(p, torch.nn.Parameter)
    assert p._handle is q._handle


def linear(kind: str) -> torch.nn.Linear:
    module = torch.nn.Linear(32, 16)
    module.weight = torch.nn.Parameter(QUANTIZERS[kind]()(module.weight.detach()))
    return module


@EVERY
@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.bfloat16(),
        lambda m: m.to("cpu"),
        lambda m: m.to(torch.device("cpu"), torch.float16),
        lambda m: m.to("cpu").to(torch.get_default_device()),
    ],
)
def test_modules_move(kind: str, move: Callable[[torch.nn.Module], Any]) -> None:
    module = linear(kind)
    values = module.weight.detach().dequantize(torch.float32)
    parameter = module.weight
    move(module)
    assert module.weight is parameter
    assert isinstance(module.weight, QuantizedTensor)
    assert isinstance(module.weight, torch.nn.Parameter)
    assert module.weight.dtype == module.bias.dtype
    if kind != "nv rows":  # whose rounding of rounded values is another
        got = module.weight.detach().dequantize(torch.float32)
        torch.testing.assert_close(got, values.to(got.device), rtol=0.08, atol=0.01)
    x = torch.randn(3, 32, dtype=module.bias.dtype, device=module.bias.device)
    module(x).sum().backward()
    assert module.weight.device == module.bias.device


@EVERY
def test_state_dict(kind: str) -> None:
    module, other = linear(kind), linear(kind)
    state = module.state_dict()
    assert isinstance(state["weight"], QuantizedTensor)
    other.load_state_dict(state)
    assert same_bits(other.weight, module.weight)
    plain = torch.nn.Linear(32, 16)
    plain.load_state_dict(state)
    assert torch.equal(plain.weight, module.weight.detach().dequantize())
    values = torch.nn.Linear(32, 16).state_dict()
    other.load_state_dict(values)
    assert same_bits(other.weight, written(other.weight, values["weight"]))
    other.load_state_dict(state, assign=True)
    assert other.weight._handle is state["weight"]._handle
    assert isinstance(other.weight, torch.nn.Parameter)


@EVERY
def test_deepcopy(kind: str) -> None:
    module = linear(kind)
    module.weight.note = "kept"
    module(torch.randn(3, 32)).sum().backward()
    other = copy.deepcopy(module)
    assert same_bits(other.weight, module.weight)
    assert isinstance(other.weight, torch.nn.Parameter)
    assert other.weight.note == "kept"
    assert torch.equal(other.weight.grad, module.weight.grad)
    before = module.weight.detach().clone()
    with torch.no_grad():
        other.weight.fill_(3.0)
    assert same_bits(module.weight, before)
    shared = [module.weight, module.weight]
    copied = copy.deepcopy(shared)
    assert copied[0] is copied[1]
    if kind == "delayed":
        one, two = other.weight._quantizer, module.weight._quantizer
        one.amax.fill_(3.0)
        assert two.amax.item() < 3.0


def test_deepcopy_of_a_result_is_refused() -> None:
    with pytest.raises(RuntimeError, match="deepcopy takes tensors that the user made"):
        copy.deepcopy(make("mx", 16, 32).requires_grad_().clone())


# -- files


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@EVERY
@pytest.mark.parametrize("weights_only", [True, False])
def test_save_and_load(kind: str, weights_only: bool) -> None:
    q = make(kind, 2, 8, 32, dtype=torch.bfloat16)
    p = torch.nn.Parameter(q.clone())
    p.note = "kept"
    one = make(kind, 16, 32, columnwise=False)
    file = saved({"q": q, "p": p, "one": one, "again": q})
    found = torch.load(file, weights_only=weights_only)
    assert type(found["q"]) is type(q)
    assert same_bits(found["q"], q)
    assert found["q"].shape == q.shape
    assert found["q"].dtype == torch.bfloat16
    assert not found["q"].requires_grad
    assert found["again"] is found["q"]
    assert found["one"].columnwise_data is None
    assert isinstance(found["p"], torch.nn.Parameter)
    assert isinstance(found["p"], type(q))
    assert found["p"].requires_grad
    assert found["p"].note == "kept"
    # What was loaded can be written into: by a quantizer of the same settings.
    x = torch.randn(2, 8, 32)
    wanted = written(q, x).dequantize(torch.bfloat16)
    found["q"].copy_(x)
    assert torch.equal(found["q"].dequantize(), wanted)


@CLASSES
def test_pickle_and_copy(kind: str) -> None:
    q = make(kind, 16, 32)
    assert same_bits(pickle.loads(pickle.dumps(q)), q)
    assert same_bits(copy.copy(q), q)
    module = linear(kind)
    loaded = torch.load(saved(module), weights_only=False)
    assert isinstance(loaded.weight, torch.nn.Parameter)
    assert same_bits(loaded.weight, module.weight)


def file_arguments(kind: str = "nv") -> list[Any]:
    return list(make(kind, 16, 32).__reduce_ex__(2)[1])


def changed(index: int, value: Any) -> list[Any]:
    arguments = file_arguments()
    arguments[index] = value
    return arguments


def changed_part(part: int, value: Any, kind: str = "nv") -> list[Any]:
    arguments = file_arguments(kind)
    arguments[4] = [value if i == part else t for i, t in enumerate(arguments[4])]
    return arguments


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: changed(0, 2), "a file must have version 1, got 2"),
        (lambda: changed(0, "1"), "a file must have version 1, got '1'"),
        (lambda: changed(1, {"scaling": "nv", "element": "e5m2"}), "E2M1"),
        (lambda: changed(1, {"scaling": "nv", "element": 5}), "element must be a name, got 5"),
        (lambda: changed(1, {"element": "e2m1", "scaling": "nv", "block_2d": 1}), "True or False"),
        (lambda: changed(1, {"other": True}), "no field 'other'"),
        (lambda: changed(2, [16, 33]), r"data .* must be Byte \[16, 17\]"),
        (lambda: changed(2, [-16, -32]), "no negative sizes"),
        (lambda: changed(2, []), "at least one dimension"),
        (lambda: changed(2, [2**62, 2**62, 32]), "data .* must be"),
        (lambda: changed(3, torch.float64), "stands for float32, bfloat16 or float16, got Double"),
        (lambda: changed(4, []), "places for 6 parts, got 0"),
        (lambda: changed(4, [None] * 6), "row-wise or column-wise data, got neither"),
        (lambda: changed_part(0, bytes_of(16, 15)), r"row-wise data .* must be Byte \[16, 16\]"),
        (lambda: changed_part(0, torch.zeros(16, 16)), "row-wise data .* got Float"),
        (lambda: changed_part(1, bytes_of(16, 3)), r"row-wise scale .* must be Byte \[16, 2\]"),
        (lambda: changed_part(1, None), "row-wise scale .* got nothing"),
        (lambda: changed_part(2, torch.ones(2)), r"row-wise amax .* must be Float \[1\]"),
        (lambda: changed_part(2, torch.tensor([float("nan")])), "row-wise amax .* be finite"),
        (lambda: changed_part(3, bytes_of(32, 16)), "column-wise data .* must be"),
        (lambda: changed_part(4, bytes_of(1, 1)), "column-wise scale .* must be"),
        (
            lambda: changed_part(1, torch.tensor([float("nan")]), "current"),
            "row-wise scale .* must be finite",
        ),
        (
            lambda: changed_part(1, torch.tensor([float("inf")]), "delayed"),
            "row-wise scale .* must be finite",
        ),
        (lambda: changed_part(2, torch.ones(1), "mx"), "has no row-wise amax"),
        (lambda: changed_part(0, "code"), "must be a tensor, got"),
    ],
)
def test_files_that_are_wrong(arguments: Callable[[], list[Any]], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        _rebuild_quantized(*arguments())


def test_a_hostile_file_runs_nothing() -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return _rebuild_quantized, (2, {}, [], torch.float32, [], False)

    with pytest.raises(ValueError, match="a file must have version 1, got 2"):
        torch.load(saved({"w": Hostile()}), weights_only=True)

    class Worse:
        def __reduce__(self) -> Any:
            return torch._tensor._rebuild_from_type_v2, (print, MXFP8Tensor, ("run",), {})

    with pytest.raises(pickle.UnpicklingError, match="print"):
        torch.load(saved({"w": Worse()}), weights_only=True)


# -- other processes


def _child(inbox: Any, outbox: Any) -> None:
    torch.set_num_threads(1)
    q = inbox.get()
    outbox.put((type(q).__name__, q.is_shared(), q.dequantize()))
    inbox.get()  # the parent has written
    outbox.put(q.dequantize())
    q.fill_(2.0)
    outbox.put("written")
    inbox.get()


def test_shared_memory(device: str) -> None:
    if device != "cpu":
        pytest.skip("memory of this device is not shared")
    context = mp.get_context("fork")
    q = make("mx", 16, 32)
    assert not q.is_shared()
    assert q.share_memory_() is q
    assert q.is_shared()
    inbox, outbox = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=_child, args=(inbox, outbox))
    process.start()
    inbox.put(q)
    name, shared, values = outbox.get()
    assert name == "MXFP8Tensor"
    assert shared
    assert torch.equal(values, q.dequantize())
    q.fill_(1.0)
    inbox.put("written")
    assert torch.equal(outbox.get(), torch.ones(16, 32))
    assert outbox.get() == "written"
    assert torch.equal(q.dequantize(), torch.full((16, 32), 2.0))
    inbox.put("done")
    process.join()
    assert process.exitcode == 0


class QuantizedData(torch.utils.data.Dataset[Any]):
    def __init__(self, kind: str) -> None:
        self.rows = [make(kind, 4, 32) for _ in range(6)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader(workers: int, device: str) -> None:
    if device != "cpu":
        pytest.skip("loaders work with CPU tensors")
    data = QuantizedData("mx")
    single = torch.utils.data.DataLoader(data, batch_size=None, num_workers=workers)
    for got, row in zip(single, data.rows, strict=True):
        assert isinstance(got, MXFP8Tensor)
        assert same_bits(got, row)
    batches = torch.utils.data.DataLoader(data, batch_size=3, num_workers=workers)
    got = torch.cat(list(batches))
    assert type(got) is torch.Tensor
    assert torch.equal(got, torch.stack([row.dequantize() for row in data.rows]))
