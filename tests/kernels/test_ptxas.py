"""Any Triton kernel compiled without a GPU: what is reported, what is found, and what is refused."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import small_kernels
from small_kernels import copy_kernel, general_kernel, not_a_kernel, scale_kernel

from rebased.cli import main
from rebased.kernels import ptxas
from rebased.kernels.alignment import misaligned
from rebased.kernels.machine_code import compile_launch, false_descriptors
from rebased.kernels.ptxas import check_cubins, check_kernel, newer_ptxas, parse_arch, parse_value, using_ptxas

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "miscompiled_kernel.py")
PRODUCTS = ("x=*bf16", "y=*bf16", "t=*bf16", "out=*fp32", "N=64", "M=64")
SCALE: dict[str, Any] = {"x": "*fp32", "y": "*fp32", "n": "i32", "factor": "fp32"}


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["kernels", "ptxas", *words])
    return int(left.value.code or 0)


def test_a_register_that_nothing_sets_is_found() -> None:
    """As ptxas 12.8 made them of examples/miscompiled_kernel.py."""
    product = "HGMMA.64x32x16.F32.BF16 R24, R60, gdesc[UR4].tnspB, R24"
    low, upper = "UIADD3 UR6, UP0, UR12, 0x40, URZ", "UIADD3.X UR7, UR12, -0x7fffffe0, URZ, UP0, !UPT"
    assert false_descriptors([low, upper, product]) == [f"{upper} reads UR12, which nothing sets"]
    assert false_descriptors([low, upper, product, "UMOV UR12, URZ"]) == []  # it may come round by a loop
    assert false_descriptors(["ULDC.64 UR12, c[0x0][0x208]", low, upper, product]) != []


def test_a_register_that_only_the_addition_sets_is_found() -> None:
    """As ptxas 12.8 made it of the delta rule's gradients: UR35 has no value before something is added to it."""
    low, upper = "UIADD3 UR34, UP1, UR34, 0x40, URZ", "UIADD3.X UR35, UR35, -0x7fffffe0, URZ, UP1, !UPT"
    product = "HGMMA.64x32x16.F32.BF16 R56, R28, gdesc[UR32].tnspB, R56"
    wrong = [
        f"{upper} reads UR35, which nothing sets",
        *(f"{product} reads UR{n}, which nothing sets" for n in (34, 35)),
    ]
    assert false_descriptors([low, upper, product]) == wrong
    assert false_descriptors(["USGXT.U32 UR34, UR8, 0xe", "UMOV UR35, URZ", low, upper, product]) == []


def test_a_descriptor_that_nothing_builds_is_found() -> None:
    both, one = "HGMMA.64x64x16.F32 R24, gdesc[UR8], RZ, !UPT", "HGMMA.64x64x16.F32 R24, R4, gdesc[UR8], RZ"
    built = ["UIADD3.64 UR10, UR4, 0x2, URZ"]
    assert false_descriptors([*built, one]) == []
    found = false_descriptors([*built, both])
    assert found == [f"{both} reads UR8, which nothing sets", f"{both} reads UR9, which nothing sets"]
    for line in ("R2UR UR8, R3", "VOTEU.ANY UR8, UPT, PT", "S2UR UR8, SR_CgaCtaId", "ULOP3.LUT UP0, UR8, UR4, 0x1"):
        assert false_descriptors([*built, line, both]) == found[1:], line
    assert false_descriptors([*built, "UISETP.NE.U32.AND UP0, UPT, UR8, 0x1, UPT", both]) == found  # it reads


def test_half_of_a_shifted_number_leaves_the_next_register_alone() -> None:
    built = ["UMOV UR8, URZ", "USHF.L.U64.HI UR7, UR7, 0x2, UR18"]
    upper = "UIADD3.X UR19, UR8, 0x40000040, URZ, UP2, !UPT"
    assert false_descriptors([*built, upper]) == []
    assert false_descriptors([*built, "ULDC.64 UR8, c[0x0][0x210]", upper]) != []


def listed(*lines: str) -> str:
    """As nvdisasm prints instructions and labels."""
    return "\n".join(line if line.startswith(".L") else f"        /*0000*/    {line} ;" for line in lines)


BASE = ("S2UR UR5, SR_CgaCtaId", "UMOV UR7, 0x400", "ULEA UR7, UR5, UR7, 0x18", "S2R R123, SR_TID.X")
SHIFTED = "SHF.R.U32.HI R23, RZ, 0x1, R22"
ADDRESS = (
    "LOP3.LUT R23, R123, 0x6, RZ, 0xc0, !PT",
    "LOP3.LUT R22, R123, 0x30, RZ, 0xc0, !PT",
    "LEA R22, R22, R23, 0x2",
    SHIFTED,
    "SHF.L.U32 R22, R22, 0x4, RZ",
    "IMAD.SHL.U32 R20, R123, 0x2, RZ",
    "LOP3.LUT R20, R23, 0x90, R20, 0x78, !PT",
    "LOP3.LUT R23, R123, 0x1, RZ, 0xc0, !PT",
    "IMAD.SHL.U32 R23, R23, 0x8, RZ",
    "LOP3.LUT R20, R23, R22, R20, 0x1e, !PT",
)
"""Of a layout of shared memory, as ptxas 12.8 computes it in query_grad_kernel: R22 is shifted to the right after
something was added to it, and before in PTX."""


def test_an_address_that_is_computed_wrong_is_found() -> None:
    store = "STS.64 [R20+UR7+0x100], R14"
    right = [line for line in ADDRESS if line != SHIFTED]
    right.insert(2, SHIFTED)
    assert misaligned(listed(*BASE, *right, store)) == []
    assert misaligned(listed(*BASE, *ADDRESS, store)) == [f"{store} is at no multiple of 8"]
    assert misaligned(listed(*BASE, *ADDRESS, store.replace(".64", ".U8"))) == []
    kept = ("STL [R1+0x150], R20", "MOV R20, RZ", "LDL.LU R122, [R1+0x150]")
    assert misaligned(listed(*BASE, *ADDRESS, *kept, "LDS.64 R18, [R122+UR7]", store)) != []


def test_an_address_that_is_not_known_is_not_judged() -> None:
    load = "LDS.128 R8, [R2]"
    assert misaligned(listed("S2R R2, SR_TID.X", load)) == [f"{load} is at no multiple of 16"]
    for line in ("LDG.E R2, desc[UR8][R4.64]", "@P0 MOV R2, RZ", "LDS.64 R1, [R8]", "SHFL.BFLY PT, R2, R2, 0x1, 0x1f"):
        assert misaligned(listed("S2R R2, SR_TID.X", line, load)) == [], line
    assert misaligned(listed("S2R R2, SR_TID.X", f"@P0 {load}")) == []
    around = ("MOV R2, RZ", "@P0 BRA `(.L_x_0)", "S2R R2, SR_TID.X", "BRA `(.L_x_1)", ".L_x_0:", load, ".L_x_1:", load)
    assert misaligned(listed(*around)) == []  # the second comes from both sides
    assert misaligned(listed("S2R R2, SR_TID.X", *around[1:])) != []


def test_a_report() -> None:
    (report,) = check_kernel(scale_kernel, SCALE, num_warps=2)
    assert report.name == "scale_kernel"
    assert report.constants == {"BLOCK": 128, "num_warps": 2}
    assert 0 < report.registers < 64
    assert (report.stack, report.shared, report.products, report.wrong) == (0, 0, 0, [])
    assert report.instructions > 10
    assert report.seconds is not None


def arguments_of(kernel: Any, **values: Any) -> list[tuple[str, bool]]:
    """The arguments that are left after specialisation, and whether each is known to be a multiple of 16."""
    launch = {"kernel": kernel, "values": values, "options": {"num_warps": 1}}
    head = re.findall(r"tt\.func public @\w+\((.*)\) attributes", compile_launch(launch, 90).asm["ttir"])[0]
    return [(name, bool(multiple)) for name, multiple in re.findall(r"%(\w+): \S+( \{tt\.divisibility = 16)?", head)]


def test_numbers_are_specialised_as_triton_does() -> None:
    given = SCALE | {"x": "*fp32:1", "y": "*fp32:16", "BLOCK": 128}
    others = [("x", False), ("y", True), ("factor", False)]
    for n, left in (("i32", [("n", False)]), (4096, [("n", True)]), (1, [])):
        assert arguments_of(scale_kernel, **given | {"n": n}) == [*others[:2], *left, others[2]]


@pytest.mark.parametrize("n", [1, 16])
def test_a_kernel_may_forbid_to_specialise(n: int) -> None:
    found = arguments_of(general_kernel, x="*fp32:16", y="*fp32:16", n=n)
    assert found == [("x", False), ("y", True), ("n", False)]


def test_every_config_of_an_autotuned_kernel() -> None:
    reports = check_kernel(copy_kernel, {"x": "*fp32", "y": "*fp32", "n": 96})
    assert [report.constants for report in reports] == [
        {"BLOCK": 64, "EVEN": False, "num_warps": 1, "num_stages": 3, "num_ctas": 1},
        {"BLOCK": 128, "EVEN": False, "num_warps": 2, "num_stages": 1, "num_ctas": 1},
    ]
    (one,) = check_kernel(copy_kernel, {"x": "*fp32", "y": "*fp32", "n": 96, "BLOCK": 32}, num_warps=1, num_stages=2)
    assert one.constants["EVEN"] is True
    with pytest.raises(ValueError, match="also needs the constants EVEN; give each as NAME=VALUE, for example EVEN=64"):
        check_kernel(copy_kernel, {"x": "*fp32", "y": "*fp32", "n": "i32"})  # the heuristic needs a number


@pytest.mark.parametrize(
    ("kernel", "changes", "message"),
    [
        (scale_kernel, {"z": 1}, "kernel scale_kernel has no argument 'z'; it takes x, y, n, factor, BLOCK"),
        (scale_kernel, {"x": "bf17"}, "x=bf17: not a type"),
        (scale_kernel, {"x": "*fp32:3"}, r"x=\*fp32:3: not a type"),
        (scale_kernel, {"BLOCK": 3}, "scale_kernel does not compile for sm_90: .*power of 2"),
        (not_a_kernel, {}, "not_a_kernel .*is not a Triton kernel: it needs @triton.jit"),
    ],
)
def test_mistakes_are_named(kernel: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_kernel(kernel, SCALE | changes)


def test_arguments_that_are_missing_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"also needs the constants BLOCK, EVEN and types of x, y, n; .*example x="):
        check_kernel(copy_kernel.fn, {})


def test_what_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from triton import knobs

    monkeypatch.setattr(ptxas, "has_triton", lambda: False)
    with pytest.raises(ValueError, match=r"needs Triton 3\.5 or newer"):
        check_kernel(scale_kernel, SCALE)
    monkeypatch.undo()
    with pytest.raises(OSError, match="is not a ptxas that runs here"), using_ptxas(str(tmp_path / "ptxas")):
        pass
    for name in ("nvdisasm", "ptxas"):
        tool = type(knobs.nvidia).__dict__[name]
        monkeypatch.setattr(tool, "default_path", str(tmp_path / name))
        with pytest.raises(OSError, match=f"{name} is not there"):
            check_kernel(scale_kernel, SCALE)
        monkeypatch.undo()


def test_gpus_by_name() -> None:
    assert [parse_arch(name) for name in ("sm_80", "sm90", "90", "sm_90a", "sm_100")] == [80, 90, 90, 90, 100]
    for name in ("gfx942", "sm_95", "sm_35", "hopper", ""):
        with pytest.raises(ValueError, match="is not a GPU that Triton compiles for here; choose one of sm_75, sm_80"):
            parse_arch(name)


def test_values_of_the_command_line() -> None:
    words = ("64", "-1", "1e-6", "True", "false", "none", "*bf16", "i32:16", "relu")
    assert [parse_value(word) for word in words] == [64, -1, 1e-6, True, False, None, "*bf16", "i32:16", "relu"]


@pytest.mark.skipif(ptxas.ptxas_version() != "12.8", reason="another ptxas may compile the example right")
def test_a_miscompiled_kernel_is_found_and_the_newer_ptxas_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{EXAMPLE}:two_products", *PRODUCTS, "W=32") == 1
    said = capsys.readouterr().out
    assert "WRONG: UIADD3.X" in said
    assert "miscompiled: 1 of 1 kernel" in said
    newer = newer_ptxas()
    assert newer is not None
    assert (
        f"ptxas {newer[0]}, which Triton brings for newer GPUs, compiles it right: TRITON_PTXAS_PATH={newer[1]}" in said
    )


def test_a_sound_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{EXAMPLE}:two_products", *PRODUCTS, "W=64", "--json", "-") == 0
    result = json.loads(capsys.readouterr().out)
    (kernel,) = result["kernels"]
    assert kernel["products"] == 8
    assert (result["wrong"], result["remedy"], kernel["wrong"]) == (0, None, [])
    assert run("small_kernels:scale_kernel", "x=*fp32", "y=*fp32", "n=i32", "factor=fp32", "--arch", "sm_80") == 0
    assert "nothing to check: no kernel uses Hopper's products (1 kernel)" in capsys.readouterr().out


def test_compiled_kernels_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = {"kernel": scale_kernel, "values": {**SCALE, "BLOCK": 128}, "options": {"num_warps": 1}}
    cubin = compile_launch(launch, 90).asm["cubin"]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "scale.cubin").write_bytes(cubin)
    (tmp_path / "b" / "scale.json").write_text('{"shared": 12, "num_warps": 1}')
    (tmp_path / "a" / "scale.json").write_text("[not json")
    found = [(path.parent.name, report.shared, report.constants) for path, report in check_cubins(tmp_path)]
    assert found == [("a", None, {}), ("b", 12, {"num_warps": 1})]
    monkeypatch.setattr("rebased.kernels.machine_code.false_descriptors", lambda _: ["a wrong one"])
    assert run(str(tmp_path / "b" / "scale.cubin")) == 1
    said = capsys.readouterr().out
    assert "WRONG: a wrong one" in said
    assert "miscompiled: 1 of 1 kernel" in said
    (tmp_path / "a" / "scale.cubin").write_bytes(b"no machine code")
    with pytest.raises(ValueError, match="cannot read this compiled kernel"):
        list(check_cubins(tmp_path / "a"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("small_kernels:scale_kernal",), "small_kernels has no 'scale_kernal'; did you mean 'scale_kernel'?"),
        (("no_such_module:k",), "no_such_module failed: ModuleNotFoundError"),
        ((EXAMPLE,), "which kernel in this file? write"),
        (("nowhere",), "nowhere: there is no compiled kernel (.cubin)"),
        (("nowhere", "x=*bf16"), "nowhere is compiled already; arguments and --ptxas need FILE.py:KERNEL"),
        (("small_kernels:scale_kernel", "x"), "'x' is not an argument of a kernel; write NAME=VALUE"),
        (("small_kernels:scale_kernel", "x=1", "x=2"), "x is given twice"),
    ],
)
def test_the_command_names_mistakes(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    assert small_kernels.__name__ in sys.modules
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
