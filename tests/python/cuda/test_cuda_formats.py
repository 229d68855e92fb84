"""Low precision on a GPU gives the CPU's bits: data, scales and largest values of every format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from delayed_reference import state_of

import ligature as te
from ligature import _C
from ligature.quantization import note_weights_changed

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)
if not te.show_config("dict")["cuda"]["built"]:
    pytest.skip("built without the CUDA backend", allow_module_level=True)

E4M3 = {"element": "e4m3"}
E5M2 = {"element": "e5m2"}
NV = {"scaling": "nv", "element": "e2m1"}
FORMATS: dict[str, dict[str, Any]] = {
    "delayed e4m3": {"scaling": "delayed", **E4M3},
    "delayed e5m2": {"scaling": "delayed", **E5M2},
    "current e4m3": {"scaling": "current", **E4M3},
    "current e5m2 pow2": {"scaling": "current", **E5M2, "power_of_2_scales": True},
    "current epsilon": {"scaling": "current", **E4M3, "amax_epsilon": 0.5},
    "1x128": {"scaling": "block", **E4M3, "power_of_2_scales": True},
    "1x128 f32 e5m2": {"scaling": "block", **E5M2},
    "128x128": {"scaling": "block", **E4M3, "power_of_2_scales": True, "block_2d": True},
    "128x128 f32": {"scaling": "block", **E4M3, "block_2d": True, "amax_epsilon": 1e-3},
    "mx e4m3": {"scaling": "mx", **E4M3},
    "mx e5m2": {"scaling": "mx", **E5M2},
    "mx 32x32": {"scaling": "mx", **E4M3, "block_2d": True},
    "nv": NV,
    "nv 16x16": {**NV, "block_2d": True},
    "nv rows": {**NV, "row_scaled": True},
    "nv 4/6 mae": {**NV, "four_over_six": "mean_absolute"},
    "nv 4/6 mse": {**NV, "four_over_six": "mean_square"},
    "nv 16x16 4/6": {**NV, "block_2d": True, "four_over_six": "mean_square"},
    "nv rows 4/6": {**NV, "row_scaled": True, "four_over_six": "mean_absolute"},
    "nv 4/6 to 448": {**NV, "four_over_six": "mean_square", "scales_to_448": True},
    "nv hadamard": {**NV, "hadamard": True},
    "nv hadamard rows": {**NV, "hadamard": True, "row_scaled": True},
    "nv random": {**NV, "stochastic_rounding": True},
    "nv random 16x16": {**NV, "stochastic_rounding": True, "block_2d": True},
    "nv random hadamard 4/6": {
        **NV,
        "stochastic_rounding": True,
        "hadamard": True,
        "four_over_six": "mean_absolute",
    },
}
ALL = pytest.mark.parametrize("name", FORMATS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(1, 1), (3, 7), (16, 16), (128, 128), (130, 257), (1000, 1024), (64, 8192), (0, 64)]
ORIENTATIONS = [(True, True), (True, False), (False, True)]


@pytest.fixture
def device() -> Iterator[str]:
    """Tensors are made on the CPU and copied: both sides have the same bits."""
    with torch.device("cpu"):
        yield "cpu"


def quantize(
    x: torch.Tensor,
    fields: dict[str, Any],
    scale: float = 1.0,
    rowwise: bool = True,
    columnwise: bool = True,
) -> tuple[_C.QuantizedTensor, torch.Tensor | None]:
    delayed: list[torch.Tensor | None] = [None, None]
    if fields["scaling"] == "delayed":
        delayed = [torch.tensor([scale]).to(x.device), torch.tensor([0.25]).to(x.device)]
    torch.manual_seed(5)  # of stochastic rounding
    return _C.Quantizer(fields, rowwise, columnwise, *delayed).quantize(x), delayed[1]


def same_bits(got: torch.Tensor | None, wanted: torch.Tensor | None, what: str) -> None:
    """Equal bit for bit; float NaNs of any kind are equal."""
    assert (got is None) == (wanted is None), what
    if got is None or wanted is None:
        return
    assert got.device.type == "cuda", what
    got = got.cpu()
    assert got.dtype == wanted.dtype, what
    assert got.shape == wanted.shape, what
    if got.is_floating_point():
        assert torch.equal(got.isnan(), wanted.isnan()), what
        bits = {4: torch.int32, 2: torch.int16}[got.element_size()]
        got = got.nan_to_num(0.0, torch.inf, -torch.inf).contiguous().view(bits)
        wanted = wanted.nan_to_num(0.0, torch.inf, -torch.inf).contiguous().view(bits)
    different = (got != wanted).nonzero()
    assert len(different) == 0, (
        f"{what}: {len(different)} of {got.numel()} differ, the first at {different[0].tolist()}: "
        f"got {got[tuple(different[0])]}, wanted {wanted[tuple(different[0])]}"
    )


NAMES = ["data", "scale", "amax", "turned data", "turned scale", "turned amax"]


def check(
    x: torch.Tensor,
    fields: dict[str, Any],
    scale: float = 1.0,
    rowwise: bool = True,
    columnwise: bool = True,
    view: torch.Tensor | None = None,
) -> None:
    """`view`: x on the GPU, where it is not simply a copy."""
    on_gpu = x.cuda() if view is None else view
    got, got_amax = quantize(on_gpu, fields, scale, rowwise, columnwise)
    wanted, wanted_amax = quantize(x, fields, scale, rowwise, columnwise)
    where = f"{tuple(x.shape)} {x.dtype} {rowwise} {columnwise}"
    for a, b, what in zip(got.parts, wanted.parts, NAMES, strict=True):
        same_bits(a, b, f"{what} {where}")
    same_bits(got_amax, wanted_amax, f"largest {where}")
    for dtype in DTYPES:
        same_bits(got.dequantize(dtype), wanted.dequantize(dtype), f"values {where} {dtype}")


def spread(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Some rows and columns are much larger than others, so that blocks differ."""
    rows, columns = shape
    x = torch.randn(shape) * torch.exp(torch.randn(rows, 1) * 3)
    return (x * torch.exp(torch.randn(1, columns))).to(dtype)


@ALL
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(name: str, dtype: torch.dtype) -> None:
    for i, shape in enumerate(SIZES):
        check(spread(shape, dtype), FORMATS[name], scale=[1.0, 0.3, 700.0][i % 3])


@ALL
@pytest.mark.parametrize(("rowwise", "columnwise"), ORIENTATIONS[1:])
def test_one_orientation(name: str, rowwise: bool, columnwise: bool) -> None:
    for shape in [(3, 7), (128, 128), (130, 257), (96, 384), (40, 4096)]:
        for dtype in DTYPES:
            check(spread(shape, dtype), FORMATS[name], 0.7, rowwise, columnwise)


def adversarial(rows: int, columns: int) -> torch.Tensor:
    tiny = 2.0**-149
    values = [0.0, tiny, 3 * tiny, 2.0**-127, 2.0**-126, 1e-30, 1e30, 3.4028234e38, 1.0, 1 / 3]
    values += [448.0, 464.0, 480.0, 2.0**-9, 2.0**-10, 57344.0, 61440.0, 2.0**-16, 2.0**-17]
    values += [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    values += [-v for v in values]
    pool = torch.tensor(values)
    return pool[torch.randint(len(values), (rows, columns))]


@ALL
@pytest.mark.parametrize("dtype", DTYPES)
def test_adversarial_values(name: str, dtype: torch.dtype) -> None:
    fields = FORMATS[name]
    check(adversarial(70, 140).to(dtype), fields)
    for value in [float("nan"), -float("nan"), float("inf"), -float("inf")]:
        x = adversarial(150, 144)
        x[3, 5] = value
        x[17] = value
        x[:, 77] = value
        check(x.to(dtype), fields)
        check(torch.full((17, 33), value).to(dtype), fields)
    check(torch.zeros(40, 140).to(dtype), fields)
    check(-torch.zeros(40, 140).to(dtype), fields)
    for magnitude in [2.0**-149, 2.0**-140, 1e-38, 1e-20, 1e20, 3e38]:
        check((torch.randn(33, 140).clamp(-1, 1) * magnitude).to(dtype), fields, 1.0 / 3.0)


@ALL
def test_every_bfloat16(name: str) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    check(bits.view(torch.bfloat16).view(256, 256), FORMATS[name])
    mixed = bits[torch.randperm(2**16)].view(torch.bfloat16)
    check(torch.where(mixed.isfinite(), mixed, 1.0).view(256, 256), FORMATS[name])


@pytest.mark.parametrize("name", ["delayed e4m3", "delayed e5m2", "mx e4m3", "nv"])
def test_random_bits_of_floats(name: str) -> None:
    """Where the GPU's own conversion is used, all kinds of floats."""
    bits = torch.randint(-(2**31), 2**31, (2048, 1024), dtype=torch.int64).to(torch.int32)
    check(bits.view(torch.float32), FORMATS[name])


@ALL
def test_views_that_begin_anywhere(name: str) -> None:
    for dtype in DTYPES:
        x = torch.randn(130 * 264 + 1).to(dtype)
        view = x.cuda()[1:].view(130, 264)
        check(x[1:].clone().view(130, 264), FORMATS[name], view=view)


def test_other_orientation_from_one() -> None:
    for name in ["current e4m3", "128x128", "mx 32x32", "nv 16x16"]:
        for shape in [(3, 7), (16, 32), (130, 257), (256, 384)]:
            got, _ = quantize(spread(shape, torch.bfloat16).cuda(), FORMATS[name])
            rows, columns = got.only(True, False), got.only(False, True)
            rows.make_usage(True, True)
            columns.make_usage(True, True)
            for made in (rows, columns):
                for a, b in zip(made.parts, got.parts, strict=True):
                    assert (a is None) == (b is None)
                    assert a is None or torch.equal(a, b)


def test_hadamard_is_undone() -> None:
    for shape in [(16, 16), (70, 40), (33, 130)]:
        x = spread(shape, torch.float32)
        got, _ = quantize(x.cuda(), FORMATS["nv hadamard"], columnwise=True)
        wanted, _ = quantize(x, FORMATS["nv hadamard"], columnwise=True)
        for dtype in DTYPES:
            same_bits(
                got.only(False, True).dequantize(dtype),
                wanted.only(False, True).dequantize(dtype),
                f"{shape} {dtype}",
            )


@pytest.mark.usefixtures("_large_memory")
@pytest.mark.parametrize("name", ["delayed e4m3", "1x128", "mx e4m3"])
def test_more_than_two_to_the_31_elements(name: str) -> None:
    rows, columns = 2**16 + 1, 2**15
    free, _ = torch.cuda.mem_get_info()
    if free < 16 * rows * columns:
        pytest.skip("not enough memory on this GPU")
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(columns).to(torch.bfloat16).cuda()
    last = x[-128:].clone()
    for both in (False, True):
        got, _ = quantize(x, FORMATS[name], columnwise=both)
        wanted, _ = quantize(last[-1:], FORMATS[name], columnwise=False)
        assert torch.equal(got.parts[0][-1:], wanted.parts[0])
        assert got.parts[0][:-1].count_nonzero() == 0
        if both:
            assert got.parts[3][:, :-1].count_nonzero() == 0
            values = got.only(False, True).dequantize(torch.float32)[-1]
            assert (values - last[-1].float()).abs().max() <= last.abs().max() / 8
        del got


def test_nothing_waits_for_the_gpu() -> None:
    x = torch.randn(256, 512, dtype=torch.bfloat16, device="cuda")
    quantizers = []
    for fields in FORMATS.values():
        delayed = [None, None]
        if fields["scaling"] == "delayed":
            delayed = [torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")]
        quantizers.append(_C.Quantizer(fields, True, True, *delayed))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for quantizer in quantizers:
            quantizer.quantize(x).dequantize(torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("history", [1, 3, 600])
def test_delayed_scaling_moves_on_as_on_the_cpu(algorithm: str, history: int) -> None:
    """The state of a linear layer's input after a few steps with inputs of known size."""
    recipe = te.recipe.DelayedScaling(
        amax_history_len=history, amax_compute_algo=algorithm, margin=1
    )
    states: dict[str, list[torch.Tensor]] = {}
    for place in ("cpu", "cuda"):
        torch.manual_seed(0)
        layer = te.ops.BasicLinear(64, 64, device="cpu").to(place)
        states[place] = []
        for size in [3.0, 0.0, 7.5, float("inf"), 1e-3]:
            with torch.no_grad(), te.autocast(recipe=recipe):
                layer(torch.full((32, 64), size, device=place))
            states[place] += [t.cpu() for t in state_of(layer)[0][0]]
    assert len(states["cuda"]) == 15
    for cpu, cuda in zip(states["cpu"], states["cuda"], strict=True):
        assert torch.equal(cpu, cuda)


def test_weights_on_a_gpu_are_quantized_anew_after_a_step() -> None:
    layer = te.ops.Linear(128, 128, bias=False, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5, fused=True)
    x = torch.randn(32, 128, dtype=torch.bfloat16).cuda()
    recipe = te.recipe.Float8CurrentScaling()

    def run() -> torch.Tensor:
        with te.autocast(recipe=recipe):
            return layer(x)

    before = run()
    before.float().square().sum().backward()
    assert torch.equal(before, run())
    optimizer.step()
    after = run()
    assert not torch.equal(before, after)
    fresh = te.ops.Linear(128, 128, bias=False, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        next(fresh.parameters()).copy_(next(layer.parameters()))
    with te.autocast(recipe=recipe):
        assert torch.equal(fresh(x), after)
    next(layer.parameters()).data.mul_(2)
    note_weights_changed()
    assert not torch.equal(run(), after)
