"""Classes of kernels: which different kernels a call can launch, and a set of calls that launches all of them.

K, V and T are constants of a kernel, so there are more kernels than anyone can compute. A class leaves out the numbers
that select no other code. A launch has several classes, each a few properties that are crossed: the tile with the
padded widths, the tile with the flags, and how the data lie in memory. `reachable` sweeps over sizes and finds all
classes of polynomial attention, without a GPU; `calls` is a small set of calls that has them all.
`compute_classes` computes these calls on a GPU and keeps a record (docs/kernels.md).
"""

import ast
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from rebased import ops
from rebased.ops.backend import SMALLEST_SHARED_MEMORY
from rebased.ops.kernel_launch import Launch, planned
from rebased.ops.polynomial.gpu import launch as gpu
from rebased.ops.polynomial.gpu import plan as plans
from rebased.ops.polynomial.gpu.call import NO_DOCUMENTS, Documents, make_call
from rebased.ops.polynomial.gpu.call import Call as Sizes
from rebased.ops.polynomial.gpu.selected import poly_at, poly_at_backward
from rebased.ops.polynomial.state import Coefficients

C = TypeVar("C")
Launched = tuple[Launch, tuple[Any, ...]]
Arithmetic = Literal["bf16", "fp16", "tf32", "fp32"]
"""bf16 and fp16 inputs, fp32 inputs with products in TF32, fp32 inputs with exact products."""
Kind = Literal["plain", "packed", "extend", "packed extend", "extend o", "at", "decode"]
"""packed: with cu_seqlens. extend: a state in and out, "extend o" with a gradient of o alone. at: some queries."""
Layout = Literal["plain", "heads", "fused", "odd", "expanded", "far"]
"""How q, k and v lie in memory: `cut` says it."""
Tiles = Literal["large", "small", "safe"]
"""Those of a GPU with much shared memory, of one with little, and those that replace kernels found wrong."""

ARITHMETICS: tuple[Arithmetic, ...] = ("bf16", "fp16", "tf32", "fp32")
KINDS: tuple[Kind, ...] = ("plain", "packed", "extend", "packed extend", "extend o", "at", "decode")
LAYOUTS: tuple[Layout, ...] = ("plain", "heads", "fused", "odd", "expanded")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
PRODUCTS: dict[str, plans.Products] = {"bf16": "bf16", "fp16": "tf32", "tf32": "tf32", "fp32": "tf32x3"}
WIDTHS = (1, 5, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128)
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 384, 511, 512, 513, 700, 1024, 1025, 2048, 8192, 8193, 9000)
BATCHES = ((1, 2), (2, 1), (1, 3), (3, 2))  # batch rows, heads
GUARD = 64  # numbers before and after a tensor: a multiple of what alignment counts


class Call(NamedTuple):
    """A call of polynomial attention, with its gradients."""

    arithmetic: Arithmetic
    K: int
    V: int
    T: int
    low: bool  # True if c0 and c1 are not zero
    kind: Kind = "plain"
    layout: Layout = "plain"
    B: int = 1
    H: int = 2
    tiles: Tiles = "large"
    chunked: bool = False  # True: whatever the cost model would choose, as for a longer sequence
    gated: bool = False  # True: with log_decay

    @property
    def coefficients(self) -> Coefficients:
        """Those of Based, or of ReBased."""
        return (1.0, 1.0, 0.5) if self.low else (0.0, 0.0, 1.0)

    @property
    def bounds(self) -> list[int]:
        """cu_seqlens of packed documents: short and long ones, and where they may be an empty one."""
        inner = sorted({min(5, self.T), self.T // 2} - {0, self.T})
        empty = inner[:1] if "extend" not in self.kind else []
        return sorted([0, *inner, *empty, self.T])

    @property
    def queries(self) -> int:
        """Of a call for some queries: how many per row."""
        return self.T // 4 + 1


def cut(call: Call, allocate: Callable[[int], Tensor]) -> list[Tensor]:
    """q, k, v and do as views of flat buffers, which `allocate` makes; around and between them are other numbers.

    heads: [B, H, T, width] in memory. fused: q, k and v of one projection. odd: no stride and no address is a multiple
    of two. expanded: k and v of all heads are the same, and q of all batch rows. far: tokens are so far apart that
    offsets need 64 bits.
    """
    B, T, H, K, V = call.B, call.T, call.H, call.K, call.V
    views: list[Tensor] = []
    if call.layout in ("fused", "far"):
        token = H * (2 * K + V)
        token = token if call.layout == "fused" else max(token, -(-(2**31) // (16 * T)) * 16)
        buffer = allocate(2 * GUARD + B * T * token)
        for w, at in ((K, 0), (K, H * K), (V, 2 * H * K)):
            views.append(buffer.as_strided((B, T, H, w), (T * token, token, w, 1), GUARD + at))
    names = "qkvo"[len(views) :]
    for name, w in zip(names, (K, K, V, V)[len(views) :], strict=True):
        tokens, offset = call.queries if name == "o" and call.kind == "at" else T, GUARD
        if call.layout == "heads":
            token, head = w + 8, tokens * (w + 8)
            batch = H * head
        elif call.layout == "odd":
            head = w + 1 + w % 2
            token = H * head + 1 + H * head % 2
            batch, offset = tokens * token + 1 + tokens * token % 2, GUARD + 1
        else:
            token, head, batch = H * w, w, tokens * H * w
        buffer = allocate(2 * GUARD + B * max(batch, H * head, tokens * token))
        if call.layout == "expanded":
            batch, head = 0 if name == "q" else batch, 0 if name in "kv" else head
        views.append(buffer.as_strided((B, tokens, H, w), (batch, token, head, 1), offset))
    return views


@cache
def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor without data. Nobody writes to one, so all of a shape and dtype are the same."""
    return torch.empty(shape, device="meta", dtype=dtype)


def launches(call: Call) -> list[Launched]:
    """What a call and its backward pass launch, on tensors without data."""
    dtype, (c0, c1, c2), sizes = DTYPES[call.arithmetic], call.coefficients, (call.B, call.H, call.K, call.V)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if call.arithmetic == "tf32" else "highest")

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return _meta(shape, dtype)

    def find(_: Sizes, cu_seqlens: Tensor | None, size: int) -> Documents:
        return NO_DOCUMENTS if cu_seqlens is None else Documents(*[empty(1, dtype=torch.int32)] * 3)

    def run() -> None:
        q, k, v, do = cut(call, empty)
        g = empty(call.B, call.T, call.H, dtype=torch.float32) if call.gated else None
        if call.kind == "decode":
            F = len(gpu.monomials(call.K, call.coefficients, 1.0, torch.device("cpu"))[0])
            state = (empty(*sizes[:2], F, *sizes[3:], dtype=torch.float32), empty(*sizes[:2], F, dtype=torch.float32))
            gpu.decode(q, k, v, *state, c0, c1, c2, 1.0, 0.0, g)
        elif call.kind == "at":
            at, q = empty(call.B, call.queries, dtype=torch.int32), empty(call.B, call.queries, call.H, call.K)
            o, o_lo, inverse = poly_at._init_fn(q, k, v, at, c0, c1, c2, 0.0)
            poly_at_backward._init_fn(do, q, k, v, at, o, o_lo, inverse, c0, c1, c2)
        else:
            states, documents = "extend" in call.kind, len(call.bounds) - 1
            cu_seqlens = empty(documents + 1, dtype=torch.int32) if "packed" in call.kind else None
            initial: tuple[Any, Any] = (None, None)
            if states:
                sequences = call.B if cu_seqlens is None else documents
                shapes = make_call(
                    call.B, call.T, call.H, call.K, call.V, None, call.low, PRODUCTS[call.arithmetic], True
                ).state_shapes(sequences)
                initial = tuple(empty(*shape, dtype=torch.float32) for shape in shapes)  # type: ignore[assignment]
            o = gpu.forward(gpu.ForwardInputs(q, k, v, cu_seqlens, *initial, c0, c1, c2, 0.0, states, g))
            d_states = (o.kv_final, o.z_final) if call.kind != "extend o" else (None, None)
            gpu.backward(
                gpu.BackwardInputs(  # type: ignore[call-arg]
                    do, *d_states, q, k, v, o.o, o.o_lo, o.inverse, o.kv, o.z, cu_seqlens,
                    *initial, c0, c1, c2, 0.0, states, g,
                )
            )  # fmt: skip

    try:
        with (
            patch.object(Sizes, "find", find),
            patch.object(gpu, "_empty", lambda *shape, like, dtype=None: _meta(shape, dtype or like.dtype)),
            patch.object(gpu, "_like", lambda x: _meta(x.shape, x.dtype)),
            taking(call),
        ):
            return planned(run)
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def taking(call: Call) -> Iterator[None]:
    """Within the block the plan takes the tiles and the regime that the call names, whatever the GPU here has."""
    widths = (PRODUCTS[call.arithmetic], call.K, call.V)
    memory = SMALLEST_SHARED_MEMORY if call.tiles == "small" else plans.LARGE
    cost = (lambda *_: 0.0) if call.chunked else plans.chunked_cost
    make_call.cache_clear()
    with patch.object(plans, "shared_memory", lambda: memory), patch.object(plans, "chunked_cost", cost):
        if call.tiles == "safe":
            plans.SAFE_WIDTHS.add(widths)
        try:
            yield
        finally:
            plans.SAFE_WIDTHS.discard(widths)
            make_call.cache_clear()


@contextmanager
def recorded_launches(run: bool) -> Iterator[list[Launched]]:
    """Within the block all launches of all operators are appended to the list; they happen only if `run`."""
    found: list[Launched] = []
    original = Launch.__call__

    def record(self: Launch, *args: Any, **options: Any) -> None:
        if not args[0].is_meta:  # else it is only planned, to be compiled
            found.append((self, args))
        if run:
            original(self, *args, **options)

    with patch.object(Launch, "__call__", record):
        yield found


_LETTERS = {
    torch.bfloat16: "b", torch.float16: "h", torch.float32: "f", torch.int32: "i", torch.int64: "l", torch.uint8: "u",
    torch.bool: "u", torch.float64: "d",
}  # fmt: skip
_EXACT = ("K", "V", "D", "N", "HEADS")  # widths that are not padded
_DERIVED = ("F", "PRECISION")
_TILE = ("BM", "BN", "BT", "num_warps", "num_stages", "maxnreg")
_MEMORY = ("EVEN", "EVEN_QUERIES", "EVEN_KEYS", "WIDE", "LO_LIKE_O")
_NO_FLAGS = (*_MEMORY, "LOW", "HI_LO")
_TABLES: tuple[Arithmetic, ...] = ("bf16", "tf32", "fp32")  # one per table of plan.py
_ODD_WIDTHS = ((5, 6), (6, 12), (12, 5), (16, 24), (24, 16), (8, 8), (40, 2))


def classes_of(launched: Launched) -> tuple[str, ...]:
    """The names of the classes of a launch."""
    launch, args = launched
    function = getattr(launch.kernel, "fn", launch.kernel)
    where = function.__module__.removeprefix("rebased.ops.").replace("_gpu", "").replace(".gpu", "")
    kernel, constants = str(function.__name__).removesuffix("_kernel"), dict(launch.constants)
    if where.startswith("polynomial"):
        return _polynomial_classes(f"poly.{kernel}", constants, args)
    flagged = ("log_decay", "bounds")  # None without their flag
    given = [x for name, x in zip(launch.kernel.arg_names, args, strict=False) if name not in flagged]
    dtypes = "".join("-" if x is None else _LETTERS[x.dtype] for x in given if x is None or isinstance(x, Tensor))
    sizes = {key: _width(value) if key in _EXACT else value for key, value in constants.items() if key not in _DERIVED}
    if "STRIDE" in sizes:
        sizes["STRIDE"] = constants["STRIDE"] != constants["D"]
    numbers = [f"{key}={value}" for key, value in sizes.items() if not isinstance(value, bool)]
    flags = [key for key, value in sizes.items() if value is True]
    return f"{where}.{kernel} {' '.join(numbers)}", " ".join((f"{where}.{kernel}", dtypes, *flags))


def _width(width: int) -> str:
    """A width without its number: a power of two, a multiple of 8, or neither."""
    return "full" if width & (width - 1) == 0 else "part" if width % 8 == 0 else "odd"


def _polynomial_classes(name: str, constants: dict[str, Any], args: tuple[Any, ...]) -> tuple[str, ...]:
    """Three kinds of classes: what sizes select, with what coefficients and states select; all flags with the tile and
    whether widths are full; and how the data lie in memory, with the dtype."""
    weighted = constants.get("WEIGHTED") and not constants.get(
        "BACKWARD"
    )  # sums that fade: without a flag of their own
    gated = ["GATED"] if constants.get("GATED") or weighted else []
    if name in ("poly.decays", "poly.decay_grad"):  # the gate itself
        numbers = [f"{key}={constants[key]}" for key in ("GATE", "TILES", "BT", "SPANS") if key in constants]
        dtypes = "".join("-" if x is None else _LETTERS[x.dtype] for x in args if x is None or isinstance(x, Tensor))
        return (" ".join((name, dtypes, *numbers, *(key for key in ("HAS_STATES", "PACKED") if constants.get(key)))),)
    K, V, VP = constants["K"], constants.get("V"), constants["VP"]
    k, v = "=<"[plans.padded(K) > K], "" if V is None else "=<"[V < VP] + ("16" if V < 16 else "")
    few = "K<=16" if K <= 16 else "K>16"  # features are in registers, or in a loop
    if name == "poly.decode":
        dtype = _LETTERS[args[0].dtype]
        more = " GATED" if gated else ""
        return f"{name} {dtype} V{v[0]}{VP}{more}", f"{name} {dtype} {few} K{k} V{v}{more}"
    low = ["LOW"] if constants.get("LOW", constants.get("TILES", 0) > constants.get("PAIRS", 0)) else []
    flags = [key.removeprefix("HAS_") for key, value in constants.items() if value is True and key not in _NO_FLAGS]
    code = low + [key.removeprefix("HAS_") for key in ("HAS_STATES", "HI_LO", "BACKWARD") if constants.get(key)]
    code += gated
    if name == "poly.running_totals":
        dtype = _LETTERS[args[4].dtype]  # of the totals
        return " ".join((name, dtype, few, f"VP={VP}", *code)), " ".join((name, dtype, few, *low, *flags))
    tile = "-".join(str(constants[key]) for key in _TILE if key in constants)
    products = "bf16" if args[0].dtype == torch.bfloat16 else constants["PRECISION"]
    dtype = f"{_LETTERS[args[0].dtype]} {products}"
    width = f"K{k}{plans.padded(K)}"
    if name == "poly.chunk_sums":
        width = f"K{k} {few} {constants['GROUP']}"
    elif "at" in name.split("_"):  # the code of the quadratic regime
        width, code = f"K{plans.padded(K)}", []
    if products != "bf16":  # products of 32 bits read no descriptors: coefficients are crossed with the flags alone
        code = [each for each in code if each != "LOW"]
    return (
        " ".join((name, products, tile, width, f"V{v[0]}{VP}", *code)),
        " ".join((name, products, tile, f"K{k}", f"V{v}", *low, *flags)),
        " ".join((name, dtype, *(key for key in _MEMORY if constants.get(key)), *gated)),
        f"{name} {dtype} K%8{'>' if K % 8 else '='}0",
        f"{name} {dtype} K_UNIT={constants['K_UNIT']}",
        f"{name} {dtype} V_UNIT={constants['V_UNIT']}",
    )


def candidates() -> Iterator[Call]:
    """One call per plan, padded widths, kind of widths, coefficients and kind; then calls that vary the memory."""
    groups: dict[tuple[Any, ...], list[Call]] = {}
    for arithmetic, K, V, low, states in product(_TABLES, WIDTHS, WIDTHS, (False, True), (False, True)):
        widths = (plans.padded(K), plans.padded(V), plans.padded(K) == K, plans.padded(V) == V)
        kinds: tuple[Kind, ...] = ("extend", "packed extend") if states else ("plain", "packed", "at")
        for T in _lengths(K, V, low, states):
            plan = plans.make_plan(T, K, V, low=low, products=PRODUCTS[arithmetic], has_state=states)
            for kind in kinds:
                if kind != "at" or (plan.chunk is None and T <= 1025):
                    key = (arithmetic, plan.chunk, plan.tiles, plan.hi_lo, *widths, low, kind, plan.chunk and K <= 8)
                    groups.setdefault(key, []).append(Call(arithmetic, K, V, T, low, kind))
    draw = random.Random(0)
    for number, group in enumerate(groups.values()):
        shortest = min(call.T for call in group)
        call = draw.choice([call for call in group if max(2 * shortest, 2048) >= call.T])
        if shortest > 2048:  # the same kernels for a shorter sequence, in a fraction of the time
            long = call.arithmetic == "bf16" and call.T > plans.LONG
            call = call._replace(T=(plans.LONG + 1 if long else 513) + call.T % 2, chunked=True)
        if call.arithmetic == "tf32" and draw.random() < 0.5:
            call = call._replace(arithmetic="fp16")
        call = _placed(call, LAYOUTS[number % len(LAYOUTS)], *BATCHES[number % len(BATCHES)])
        yield call
        if call.kind != "at":
            yield call._replace(gated=True)
    strided: tuple[Kind, ...] = ("plain", "extend", "at")
    for arithmetic, (K, V), layout, kind in product(ARITHMETICS, _ODD_WIDTHS, LAYOUTS, strided):
        yield _placed(Call(arithmetic, K, V, 1500 if V == 5 else 65, K < 16, kind), layout, 1, 2)
    for arithmetic, K, low in product(_TABLES, (16, 24), (False, True)):
        yield Call(arithmetic, K, 16, 300, low, "extend o")
        yield Call(arithmetic, K, 16, 300, low, "extend o", gated=True)
    for arithmetic, T, kind in product(ARITHMETICS, (1, 64, 65, 128, 700, 2048), KINDS[:-1]):
        yield Call(arithmetic, 16, 64, T, True, kind)
        if kind != "at":
            yield Call(arithmetic, 16, 64, T, True, kind, gated=True)
    for arithmetic, K, V in product(ARITHMETICS, (5, 16, 48, 128), (5, 16, 24, 32, 48, 64, 96, 128)):
        call = _placed(Call(arithmetic, K, V, 1, V < 48, "decode"), LAYOUTS[(K + V) % len(LAYOUTS)], 2, 2)
        yield from (call, call._replace(gated=True))
    for arithmetic, T, kind in product(ARITHMETICS, (256, 300), strided[:2]):
        yield Call(arithmetic, 16, 16, T, False, kind, "far")
    other: tuple[Kind, ...] = ("plain", "packed", "extend", "at")
    for arithmetic, K, V, low, kind in product(_TABLES, WIDTHS[5::3], WIDTHS[5::3], (False, True), other):
        if plans.padded(K) + plans.padded(V) > 128:
            yield Call(arithmetic, K, V, 257 if low else 256, low, kind, tiles="small")
            if kind != "at":
                yield Call(arithmetic, K, V, 257 if low else 256, low, kind, tiles="small", gated=True)
    for arithmetic, K, V, low, kind in product(_TABLES, (16, 24, 128), (5, 64), (False, True), other[::2]):
        yield Call(arithmetic, K, V, 257 if low else 256, low, kind, tiles="safe")
        yield Call(arithmetic, K, V, 257 if low else 256, low, kind, tiles="safe", gated=True)


def _placed(call: Call, layout: Layout, B: int, H: int) -> Call:
    B = 1 if "packed" in call.kind or call.T > 1024 else B
    return call._replace(layout=layout, B=B, H=H if call.T <= 4096 else 1)


def _lengths(K: int, V: int, low: bool, states: bool) -> tuple[int, ...]:
    """Lengths at which a plan may change, and around them."""
    crossing = int(plans.chunked_cost(K, V, low) / plans.quadratic_cost(1, K, V))
    return LENGTHS if states else (*LENGTHS, crossing, crossing + 1)


@cache
def _found() -> tuple[tuple[Call, tuple[str, ...]], ...]:
    """The candidates and their classes."""
    return tuple(
        (call, tuple(dict.fromkeys(name for each in launches(call) for name in classes_of(each))))
        for call in candidates()
    )


def reachable() -> set[str]:
    """The classes of polynomial attention that the sweep finds."""
    return {name for _, names in _found() for name in names}


def calls(known: Set[str] = frozenset()) -> list[Call]:
    """Calls that together have all classes but those known."""
    return cover(dict(_found()), known)


def cover(classes: Mapping[C, Iterable[str]], known: Set[str] = frozenset()) -> list[C]:
    """Some of these calls that together have all their classes but those known: in turn the one that adds most."""
    missing, chosen = {name for names in classes.values() for name in names} - known, []
    sets = {call: set(names) for call, names in classes.items()}
    for size in range(max(map(len, sets.values())), 0, -1):
        for call, names in sets.items():
            if len(names & missing) >= size:
                chosen.append(call)
                missing -= names
    return chosen


def source_hashes(root: Path | None = None) -> dict[str, str]:
    """Per folder of operators, the SHA-256 of its kernels and plans: of their syntax without imports and docstrings, so
    that nothing counts but what is computed."""
    root = root or Path(ops.__file__).parent
    digests: dict[str, Any] = {}
    plain = ("check.py", "in_torch.py")  # without kernels
    for path in sorted(path for path in root.rglob("*.py") if "gpu" in path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        if path.name not in plain:
            digest = digests.setdefault(folder_of(name.replace("/", ".")), hashlib.sha256())
            digest.update(f"{name}\n{_syntax_of(path.read_text())}\n".encode())
    return {folder: digest.hexdigest() for folder, digest in sorted(digests.items())}


def folder_of(name: str) -> str:
    """The folder of operators that a class is of."""
    folder = name.partition(".")[0]
    return "polynomial" if folder == "poly" else folder


@cache
def _syntax_of(text: str) -> str:
    return str(_syntax(ast.parse(text)))


def _syntax(node: Any) -> Any:
    """A syntax tree as nested tuples, without imports, docstrings, and what is empty: versions of Python differ in
    that."""
    kind = type(node)
    if kind in (ast.Module, ast.FunctionDef, ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
        del node.body[0]
    if kind is list:
        return tuple([_syntax(each) for each in node if type(each) not in (ast.Import, ast.ImportFrom)])
    if isinstance(node, ast.AST):
        fields = [(name, getattr(node, name, None)) for name in node._fields]
        return kind.__name__, *[(name, _syntax(value)) for name, value in fields if value not in (None, [])]
    return repr(node)
