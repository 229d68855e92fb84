"""show_config: the same facts as data and as text, true of the running process."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest
import torch
from repository import ROOT

import ligature


def test_dict_is_plain_data_with_every_part() -> None:
    config = ligature.show_config("dict")
    assert set(config) == {
        *("version", "build", "torch", "cuda", "cpu"),
        *("devices", "backends", "formats"),
    }
    assert config["version"] == ligature.__version__
    assert config["build"]["cxx_standard"] == 20
    assert [b["name"] for b in config["backends"]] == ["cpu", "aten", "cuda"]
    assert all(b["reason"] for b in config["backends"])


def test_torch_is_the_one_that_runs() -> None:
    config = ligature.show_config("dict")
    assert config["torch"]["running"] == torch.__version__.split("+")[0]
    assert config["torch"]["built"].split(".")[:2] == config["torch"]["running"].split(".")[:2]
    assert config["cuda"]["torch"] == (torch.version.cuda is not None)


def test_cpu_agrees_with_torch() -> None:
    cpu = ligature.show_config("dict")["cpu"]
    assert cpu["torch"] == torch.backends.cpu.get_cpu_capability()
    if platform.machine() == "x86_64":
        flags = Path("/proc/cpuinfo").read_text().split()
        assert cpu["avx2"] == ("avx2" in flags)
        assert cpu["avx512"] == ("avx512f" in flags)


def test_threads_follow_torch() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert ligature.show_config("dict")["cpu"]["threads"] == before + 1
    finally:
        torch.set_num_threads(before)


def test_devices_are_those_of_torch() -> None:
    config = ligature.show_config("dict")
    wanted = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    assert [d["device"] for d in config["devices"]] == wanted
    available = {b["name"] for b in config["backends"] if b["available"]}
    assert {d["backend"] for d in config["devices"]} <= available


@pytest.mark.parametrize("entry", ligature.show_config("dict")["formats"], ids=lambda e: e["name"])
def test_formats_are_those_that_operations_take(entry: dict[str, object]) -> None:
    x = torch.ones(2, 4).to(getattr(torch, str(entry["name"])))
    if entry["available"]:
        assert ligature.ops.GELU()(x).dtype == x.dtype
    else:
        assert entry["reason"]
        with pytest.raises(TypeError):
            ligature.ops.GELU()(x)


def test_low_precision_is_a_recipe_s_business() -> None:
    reasons = {f["name"]: f["reason"] for f in ligature.show_config("dict")["formats"]}
    assert "recipe" in reasons["float8_e4m3fn"]


def test_print_shows_what_dict_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert ligature.show_config() is None
    text = capsys.readouterr().out
    config = ligature.show_config("dict")
    assert text.startswith(f"Ligature {ligature.__version__}\n")
    facts = [*config["build"].values(), *config["torch"].values(), config["cuda"]["reason"]]
    facts += [value for entry in config["backends"] for value in (entry["name"], entry["reason"])]
    for fact in facts:
        assert str(fact) in text


def test_another_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[show_config\] mode must be 'print' or 'dict'.*'json'"):
        ligature.show_config("json")  # type: ignore[call-overload]


def test_cmake_prefix_path_holds_the_package() -> None:
    path = Path(ligature.cmake_prefix_path)
    places = [path / "LigatureConfig.cmake", path / "Ligature" / "LigatureConfig.cmake"]
    assert [place.exists() for place in places].count(True) == 1


def test_the_documented_output_has_the_lines_of_the_real_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    (shown,) = re.findall(r"^```text\n(Ligature .*?)^```", page, re.M | re.S)
    ligature.show_config()
    printed = capsys.readouterr().out

    def heads(text: str) -> list[str]:
        return [line.split()[0] for line in text.splitlines() if line[0] != " "]

    assert heads(shown) == heads(printed)
