"""Find accesses to shared memory whose address a compiler got wrong: no multiple of what is read or written at once."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

THREADS = 128  # of which addresses are computed
Value = np.ndarray[Any, np.dtype[np.int64]]
"""The number that a register, or a place of the stack, holds in each thread."""
Values = dict[str, Value]
"""By name, "R4", "UR4" or "[4]"; those alone that follow from the number of the thread."""

_LINE = re.compile(
    r"(?P<label>\.L_\w+):|\s*/\*[0-9a-f]{4,}\*/\s+(?P<predicate>@\S+ )?(?P<name>[A-Z]\S*) *(?P<rest>.*?)\s*;"
)
_ACCESS = re.compile(r"(?:LDS|STS|LDGSTS|LDSM|STSM)\b")
_ADDRESS = re.compile(r"(?<!desc)\[([^\]]*)\]")
_STACK = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]")
_OPERAND = re.compile(r"(?P<minus>-?)(?P<register>U?R(?:\d+|Z))(?:\.reuse)?|(?P<number>-?0x[0-9a-f]+)")
_PREDICATE = re.compile(r"!?U?P(\d|T)")
_ONE_REGISTER = ("MOV", "R2UR", "S2R", "S2UR", "IMAD", "IADD3", "VIADD", "LEA", "LOP3", "SHF", "SGXT")


def misaligned(listing: str) -> list[str]:
    """The instructions that access shared memory at an address that is no multiple of their width: the GPU stops with
    "misaligned address". listing: what nvdisasm prints of a kernel.

    Addresses are computed for each thread, in the order of the listing and without following loops. An address that
    depends on more than the number of the thread, and an instruction with a predicate, are not checked.
    """
    found: list[str] = []
    values: Values | None = {}  # None after a jump, until a label that is jumped to
    jumps: dict[str, Values] = {}
    for line in _LINE.finditer(listing):
        name, rest = line["name"], line["rest"]
        if line["label"]:
            known = [each for each in (values, jumps.get(line["label"])) if each is not None]
            values = _same(known) if known else {}
        elif values is None:
            continue
        elif name.startswith(("BRA", "EXIT")):
            if target := re.search(r"\.L_\w+", rest):
                jumps[target[0]] = _same([values, jumps.get(target[0], values)])
            if not line["predicate"] and not _PREDICATE.match(rest):
                values = None
        elif not line["predicate"] and _ACCESS.match(name) and _is_wrong(name, rest, values):
            found.append(f"{name} {rest} is at no multiple of {_width(name)}")
        if values is not None and not line["label"]:
            for place, value in _written(name, rest, values).items():
                values.pop(place, None)
                if value is not None and not line["predicate"]:
                    values[place] = value
    return found


def _same(all_values: Sequence[Values]) -> Values:
    """What is known, and the same, wherever one comes from."""
    first, *others = all_values
    return {
        place: value
        for place, value in first.items()
        if all(place in each and np.array_equal(each[place], value) for each in others)
    }


def _is_wrong(name: str, rest: str, values: Values) -> bool:
    address = _ADDRESS.search(rest)
    terms = [_value(each, values) for each in address[1].split("+")] if address else [None]
    known = [each for each in terms if each is not None]
    return len(known) == len(terms) and bool((sum(known, np.zeros(THREADS, int)) % _width(name)).any())


def _written(name: str, rest: str, values: Values) -> dict[str, Value | None]:
    """The places that an instruction writes, and their new values; None for a value that is not known."""
    operands = [each.strip() for each in rest.split(",")]
    stack = _STACK.search(rest) if name.startswith(("LDL", "STL")) else None
    slots = [f"[{int(stack[1] or '0', 16) + at}]" for at in range(0, _width(name), 4)] if stack else []
    if name.startswith("STL"):
        return {
            slot: _value(register, values) for slot, register in zip(slots, _following(operands[1], 4), strict=False)
        }
    while operands and _PREDICATE.fullmatch(operands[0]):
        operands.pop(0)
    if not operands or not re.fullmatch(r"U?R\d+", operands[0]):
        return {}
    kind = name.removeprefix("U").partition(".")[0]
    if kind in _ONE_REGISTER and not re.search("WIDE|64", name):
        return {operands[0]: _compute(kind, name, operands[1:], values)}
    registers = _following(operands[0], _count(name))
    return dict.fromkeys(registers) | {r: values.get(slot) for r, slot in zip(registers, slots, strict=False)}


def _compute(kind: str, name: str, operands: list[str], values: Values) -> Value | None:
    """What an instruction computes; None for what is not known."""
    if kind in ("S2R", "S2UR"):
        return {"SR_TID.X": np.arange(THREADS), "SR_CgaCtaId": np.zeros(THREADS, int)}.get(operands[0])
    given = [_value(each, values) for each in operands if not _PREDICATE.fullmatch(each)]
    x = [value for value in given if value is not None]
    if len(x) < len(given) or ".X" in name:
        return None
    upper = ".HI" in name
    if kind in ("MOV", "R2UR") or name.startswith("IMAD.MOV"):
        made = x[-1]
    elif kind in ("IADD3", "VIADD"):
        made = sum(x[1:], x[0])
    elif kind == "IMAD" and not upper:
        made = x[0] * x[1] + x[2]
    elif kind == "LEA" and not upper:
        made = (x[0] << x[2]) + x[1]
    elif kind == "LOP3":
        made = _logic(x[0], x[1], x[2], int(x[3][0]))
    elif kind == "SHF" and ".L" in name and not upper:
        made = x[0] << x[1]
    elif kind == "SHF" and ".R.U32.HI" in name:
        made = x[2] >> x[1]
    elif kind == "SGXT" and ".U32" in name:
        made = x[0] & ((1 << x[1]) - 1)
    else:
        return None
    return made & 0xFFFFFFFF


def _logic(a: Value, b: Value, c: Value, table: int) -> Value:
    """The bits that a table of eight bits has for those of a, b and c."""
    made = np.zeros(THREADS, int)
    for row in range(8):
        if table >> row & 1:
            p, q, r = (x if row >> bit & 1 else ~x for x, bit in ((a, 2), (b, 1), (c, 0)))
            made |= p & q & r
    return made


def _value(operand: str, values: Values) -> Value | None:
    parts = _OPERAND.fullmatch(operand)
    if parts is None:
        return None
    if parts["number"]:
        return np.full(THREADS, int(parts["number"], 16))
    value = np.zeros(THREADS, int) if parts["register"].endswith("Z") else values.get(parts["register"])
    return -value if value is not None and parts["minus"] else value


def _following(register: str, count: int) -> list[str]:
    """A register, and those after it."""
    kind, number = re.match(r"(U?R)(\d*)", register).groups()  # type: ignore[union-attr]
    return [f"{kind}{int(number) + n}" for n in range(count)] if number else ["RZ"] * count


def _count(name: str) -> int:
    """How many registers an instruction writes, at most."""
    if "MMA" in name:
        return 128 if "GMMA" in name else 8
    if "128" in name or name.startswith("LDSM"):
        return 4
    return 2 if re.search("64|WIDE", name) or name.startswith(("D", "CS2R")) else 1


def _width(name: str) -> int:
    """The bytes that a thread reads or writes at once."""
    if name.startswith(("LDSM", "STSM")):  # eight threads per matrix have an address: all, where there are four
        return 16 if name.endswith(".4") else 1
    found = re.search(r"\.(128|64|[US]16|[US]8)\b", name)
    return int(found[1].lstrip("US")) // 8 if found else 4
