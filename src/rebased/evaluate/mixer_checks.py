"""The checks of the mixer contract: each takes the name of a registered mixer, and raises where it breaks the contract.

AssertionError and ValueError mean that the check failed, NotApplicable that the mixer does not have what it is about.
"""

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rebased.evaluate.checks import NotApplicable, require
from rebased.evaluate.mixer_cases import (
    B,
    D,
    T,
    build,
    build_extendable,
    checked_forward,
    random_inputs,
    require_near,
    require_same_function,
    state_after,
    tolerance,
)
from rebased.mixers import (
    attention_map,
    call_extend,
    check_output,
    check_state_size,
    count_numbers,
    extend_documents,
    find_residual_projections,
    forward_documents,
    has_attention_map,
    init_slots,
    mixer_name,
    tensors_of,
)
from rebased.models.config import LMConfig

DOCUMENTS = [0, 1, 12, 12, 21, 42, 44, 63]  # one of a single token, an empty one and a whole row
LENGTHS = (1, 2, 7, T, 64)
SPLITS = ([21], [1] * 21, [20, 1], [1, 20], [8, 5, 1, 7], [3, 16, 2])
FLOATS = {"float64": (torch.float64,), "float32": (torch.float32,)}
LEAK = "the output at t may depend on x[:, :t + 1] only, or the model sees the tokens that it must predict"
GENERATION = "generation gives other tokens than training"


class Check(NamedTuple):
    """One check of the contract."""

    name: str
    why: str  # what goes wrong with a mixer that fails
    function: Callable[..., None]  # takes the name of a registered mixer and `arguments`; raises if it fails
    arguments: tuple[Any, ...]
    compares: bool  # whether it compares numbers, which says nothing where the output is not finite

    def run(self, mixer: str) -> None:
        """Run the check for a registered mixer. Raises AssertionError or ValueError if it fails, NotApplicable to skip.

        The seed is fixed. Random number streams are left as they are.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                self.function(mixer, *self.arguments)
            except AssertionError:
                if self.compares and not checked_forward(build(mixer), random_inputs()).isfinite().all():
                    raise NotApplicable("the output is not finite, so its numbers cannot be compared") from None
                raise


CHECKS: list[Check] = []
"""All checks of the contract, from the simplest on."""


def check(
    why: str, cases: Mapping[str, tuple[Any, ...]] | None = None, *, compares: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that adds a function to CHECKS: once, or once per case, {label in the check's name: arguments}."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for label, arguments in (cases or {"": ()}).items():
            name = f"{function.__name__}[{label}]" if label else function.__name__
            CHECKS.append(Check(name, why, function, arguments, compares))
        return function

    return add


@check("some sequence lengths do not work", {f"T={n}": (n,) for n in LENGTHS}, compares=False)
def keeps_shape(name: str, length: int) -> None:
    """Check that x [B,T,D] gives [B,T,D], for one sequence and for several."""
    for batch in (1, B):
        checked_forward(build(name), random_inputs(batch, length))


@check("a model cannot be trained with such numbers", compares=False)
def output_is_finite(name: str) -> None:
    """Check that random x of any length gives no NaN and no infinity, for one sequence and for several."""
    for length, batch in product(LENGTHS, (1, B)):
        y = checked_forward(build(name), random_inputs(batch, length))
        bad = int((~y.isfinite()).sum())
        require(
            not bad, f"{bad} of {y.numel()} numbers of the output at a random x {list(y.shape)} are NaN or infinite"
        )


@check("the residual stream changes its dtype", FLOATS)
def keeps_dtype(name: str, dtype: torch.dtype) -> None:
    """Check that the output has the dtype of x, and the numbers it has in fp64."""
    mixer, x = build(name), random_inputs()
    other = build(name, dtype)
    other.load_state_dict(mixer.state_dict())
    y = checked_forward(other, x.to(dtype))
    require_near(y, checked_forward(mixer, x), f"the output in {dtype} against torch.float64")


@check("it cannot be trained in bfloat16")
def computes_in_bfloat16(name: str) -> None:
    """Check that bfloat16 in gives bfloat16 out, near the result in fp64."""
    mixer = build(name, torch.bfloat16)
    exact = copy.deepcopy(mixer).double()
    x = random_inputs(dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # from CPUs without bf16, which then compute anyway
        try:
            y = checked_forward(mixer, x)
        except RuntimeError as error:
            if "not implemented for 'BFloat16'" not in str(error):
                raise
            raise NotApplicable(f"mixer {name!r} does not compute in bfloat16") from error
    require_near(y, checked_forward(exact, x.double()), "the output in torch.bfloat16 against torch.float64")


@check(LEAK, {f"at={n}": (n,) for n in (1, 10, 20)})
def never_looks_ahead(name: str, at: int) -> None:
    """Check that a change of x from position `at` on changes no output before it."""
    mixer, x = build(name), random_inputs()
    changed = x.clone()
    changed[:, at:] += 10 * torch.randn_like(changed[:, at:])
    before, after = checked_forward(mixer, x), checked_forward(mixer, changed)
    require_near(after[:, :at], before[:, :at], f"the output before position {at}, after a change of x from {at} on")
    require(
        not torch.allclose(after[:, at:], before[:, at:]),
        f"the output from position {at} on does not change with x: the mixer does not read it",
    )


@check("one bad number hides where it came from", {str(value): (value,) for value in (math.nan, math.inf)})
def not_finite_reaches_no_other(name: str, value: float) -> None:
    """Check that a NaN or an infinity at one token leaves earlier tokens and other rows as they are.

    A mixer that declares `spreads_nan` is asked about other rows only.
    """
    mixer, x = build(name), random_inputs()
    changed = x.clone()
    changed[0, 10, 3] = value
    before, after = checked_forward(mixer, x), checked_forward(mixer, changed)
    require_near(after[1:], before[1:], f"other rows, with {value} in row 0")
    if reason := getattr(mixer, "spreads_nan", None):
        raise NotApplicable(f"mixer {name!r} declares spreads_nan: {reason}")
    require(
        after[0, :10].isfinite().all(),
        f"{value} at position 10 reaches earlier outputs: the mixer looks ahead, or multiplies later tokens by 0. "
        "If that cannot be helped, say why in a class attribute `spreads_nan`",
    )
    require_near(after[:1, :10], before[:1, :10], f"the output before {value} at position 10")


@check(LEAK)
def gradients_never_look_ahead(name: str) -> None:
    """Check that outputs before a position have no gradient in x from it on."""
    x = random_inputs().requires_grad_()
    (gradient,) = torch.autograd.grad(checked_forward(build(name), x)[:, :10].square().sum(), x)
    require((gradient[:, :10] != 0).any(), "the outputs before position 10 have no gradient in x before position 10")
    largest = float(gradient[:, 10:].abs().max())
    require(
        largest <= tolerance(torch.float64),
        f"the outputs before position 10 have a gradient of {largest:.2g} in x from position 10 on",
    )


@check("a weight is never trained")
def every_parameter_has_gradient(name: str) -> None:
    """Check that every parameter and x have a finite gradient that is not all zero, in training mode."""
    mixer = build(name, torch.float32).train()
    x = random_inputs(dtype=torch.float32).requires_grad_()
    (checked_forward(mixer, x) * torch.randn(B, T, D)).sum().backward()
    for key, parameter in (*mixer.named_parameters(), ("x", x)):
        require(parameter.grad is not None, f"{key} has no gradient")
        require(parameter.grad.isfinite().all(), f"the gradient of {key} is not finite")
        require((parameter.grad != 0).any(), f"the gradient of {key} is zero everywhere")


@check("training does not follow the loss")
def gradients_match_differences(name: str) -> None:
    """Check the gradients along one random direction through all parameters and x, against central differences."""
    mixer = build(name)
    point = {**{f"mixer.{key}": value.detach() for key, value in mixer.named_parameters()}, "x": random_inputs()}
    along = {key: torch.randn_like(value) for key, value in point.items()}
    weights = torch.randn(B, T, D, dtype=torch.float64)

    def loss(at: dict[str, Tensor]) -> Tensor:
        values = {key.removeprefix("mixer."): value for key, value in at.items() if key != "x"}
        return (torch.func.functional_call(mixer, values, at["x"]) * weights).sum()

    h = 1e-6
    up, down = ({key: value + s * h * along[key] for key, value in point.items()} for s in (1, -1))
    numeric = float(loss(up) - loss(down)) / (2 * h)
    leaves = {key: value.clone().requires_grad_() for key, value in point.items()}
    gradients = torch.autograd.grad(loss(leaves), list(leaves.values()))
    analytic = float(sum((g * along[key]).sum() for key, g in zip(leaves, gradients, strict=True)))
    require(
        abs(analytic - numeric) <= max(1e-5 * abs(numeric), 1e-12),
        f"the derivative by backward() is {analytic:.9g}, by central differences {numeric:.9g}",
    )


@check(
    GENERATION,
    {
        f"{'+'.join(map(str, pieces)) if len(pieces) < T else '1s'}, {name}": (pieces, *dtype)
        for pieces, (name, dtype) in product(SPLITS, FLOATS.items())
    },
)
def extend_is_forward_in_pieces(name: str, pieces: list[int], dtype: torch.dtype) -> None:
    """Check that extend over pieces of these lengths gives what forward gives."""
    mixer, x = build_extendable(name, dtype), random_inputs(dtype=dtype)
    state, outputs = mixer.init_state(B), []
    for piece in x.split(pieces, dim=1):
        y, state = call_extend(mixer, piece, state)
        outputs.append(y)
    require_near(torch.cat(outputs, dim=1), checked_forward(mixer, x), f"extend in pieces of {pieces} against forward")


@check("reports show a wrong state size", {f"T={n}": (n,) for n in (1, 5, 21)}, compares=False)
def state_has_declared_size(name: str, length: int) -> None:
    """Check that the state after `length` tokens holds as many numbers as state_size says."""
    mixer, x = build_extendable(name), random_inputs(length=length)
    _, state = call_extend(mixer, x, mixer.init_state(B))
    actual, declared = count_numbers(state), B * check_state_size(mixer, length)
    require(
        actual == declared,
        f"the state of {B} sequences of {length} tokens holds {actual} numbers; state_size says {declared}",
    )


@check("a prompt cannot be continued twice")
def given_state_is_not_changed(name: str) -> None:
    """Check that extend leaves the state it was given as it is, so that it can be used again."""
    mixer, x = build_extendable(name), random_inputs()
    _, state = mixer.extend(x[:, :9], mixer.init_state(B))
    copies = [tensor.clone() for tensor in tensors_of(state)]
    first, _ = mixer.extend(x[:, 9:], state)
    same = all(torch.equal(a, b) for a, b in zip(tensors_of(state), copies, strict=True))
    require(same, "extend changed the state it was given; return a new one instead")
    again, _ = mixer.extend(x[:, 9:], state)
    require(torch.equal(first, again), "extend gave another output when it was called again with the same state")


@check(GENERATION, FLOATS)
def slots_are_extend(name: str, dtype: torch.dtype) -> None:
    """Check that steps in slots, of sequences of different lengths, give what forward gives, and extend's states."""
    mixer, x, begins = build_extendable(name, dtype), random_inputs(dtype=dtype), (4, 0, 11)
    whole = checked_forward(mixer, x)
    slots = init_slots(mixer, B, capacity=2)
    slots.reserve(T)
    lengths = torch.tensor(begins)
    with torch.no_grad():
        for slot, begin in enumerate(begins):
            slots.put(slot, state_after(mixer, x[slot : slot + 1, :begin]), begin)
        for step in range(9):
            token, wanted = (
                torch.stack([each[slot, begin + step] for slot, begin in enumerate(begins)]).unsqueeze(1)
                for each in (x, whole)
            )
            y = check_output(mixer, token, slots.step(token, lengths + step, T), "a step in slots")
            require_near(y, wanted, f"step {step} of sequences that begin after {begins} tokens against forward")
        copies = [slots.get(slot, begin + 9) for slot, begin in enumerate(begins)]
        slots.step(x[:, :1], lengths + 9, T)  # must not change what was taken out before
        for slot, begin in enumerate(begins):
            after = state_after(mixer, x[slot : slot + 1, : begin + 9])
            for got, expected in zip(tensors_of(copies[slot]), tensors_of(after), strict=True):
                require_near(got, expected, f"the state in slot {slot} after {begin + 9} tokens against that of extend")


@check("a packed document sees another one", FLOATS)
def documents_are_apart(name: str, dtype: torch.dtype) -> None:
    """Check that packed documents give the outputs and gradients that each gives alone."""
    mixer, x = build(name, dtype), random_inputs(dtype=dtype).requires_grad_()
    tokens = x.reshape(1, B * T, D)
    alone = [checked_forward(mixer, tokens[:, i:j]) for i, j in pairwise(DOCUMENTS) if i < j]
    packed = forward_documents(mixer, x, torch.tensor(DOCUMENTS, dtype=torch.int32))
    packed = check_output(mixer, x, packed, "forward_documents")
    whole = torch.cat(alone, dim=1).view(B, T, D)
    require_same_function(mixer, x, packed, whole, "packed documents against each document alone")


@check("a prompt that is read together with others sees them", FLOATS)
def prompts_are_apart(name: str, dtype: torch.dtype) -> None:
    """Check that packed documents that follow states give the outputs and states that each gives alone."""
    mixer, x, lengths, begins = build_extendable(name, dtype), random_inputs(dtype=dtype), (1, 12, 3), (4, 0, 5)
    with torch.no_grad():
        states = [state_after(mixer, x[row : row + 1, :begin]) for row, begin in enumerate(begins)]
        pieces = [
            x[row : row + 1, begin : begin + n] for row, (begin, n) in enumerate(zip(begins, lengths, strict=True))
        ]
        packed, after = extend_documents(mixer, torch.cat(pieces, dim=1), lengths, states)
        alone = [mixer.extend(piece, state) for piece, state in zip(pieces, states, strict=True)]
    require_near(packed, torch.cat([y for y, _ in alone], dim=1), "packed prompts against each prompt alone")
    for number, (ours, (_, theirs)) in enumerate(zip(after, alone, strict=True)):
        for got, expected in zip(tensors_of(ours), tensors_of(theirs), strict=True):
            require_near(got, expected, f"the state after packed prompt {number} against that of the prompt alone")


@check("a probe shows another matrix than the model uses", FLOATS)
def attention_map_is_forward(name: str, dtype: torch.dtype) -> None:
    """Check that the attention matrix looks at no later token, and that with it apply_attention gives forward."""
    mixer, x = build(name, dtype), random_inputs(dtype=dtype)
    if not has_attention_map(mixer):
        raise NotApplicable(f"mixer {name!r} has no attention_map and apply_attention")
    A = attention_map(mixer, x)
    require(A.isfinite().all(), "the attention matrix is not finite")
    require((A.triu(1) == 0).all(), "the attention matrix looks ahead: it is not zero above the diagonal")
    y = check_output(mixer, x, mixer.apply_attention(A, x), "apply_attention")
    require_near(y, checked_forward(mixer, x), "apply_attention with attention_map against forward")


@check("sequences of a batch see each other")
def rows_are_apart(name: str) -> None:
    """Check that a row's output does not depend on the other rows of the batch."""
    mixer, x = build(name), random_inputs()
    together = checked_forward(mixer, x)
    for row in range(B):
        alone = checked_forward(mixer, x[row : row + 1])
        require_near(together[row : row + 1], alone, f"row {row} of a batch against this row alone")


@check("results cannot be reproduced")
def weights_decide_everything(name: str) -> None:
    """Check that in eval mode the output depends on x and the state_dict only."""
    mixer, x = build(name), random_inputs()
    first = checked_forward(mixer, x)
    checked_forward(mixer, random_inputs())
    require(
        torch.equal(first, checked_forward(mixer, x)),
        "in eval mode forward gave another output for the same x: it is random, or it keeps something of its last call",
    )
    other = build(name)
    other.load_state_dict(mixer.state_dict())
    require(
        torch.equal(first, checked_forward(other, x)),
        "a second mixer with the same state_dict gives another output: something it needs is not saved",
    )


@check("configs cannot name it", compares=False)
def config_matches_constructor(name: str) -> None:
    """Check that a config can name the mixer, survives JSON, and refuses unknown keys."""
    config = LMConfig(d_model=D, mixers=(name,))
    require(LMConfig.model_validate_json(config.model_dump_json()) == config, "the config changes on its way to JSON")
    require(mixer_name(build(name)) == name, f"the mixer built from the config is not {name!r}")
    message = "no error"
    try:
        LMConfig(d_model=D, mixers=({"name": name, "no_such_argument": 1},))
    except ValueError as error:
        message = str(error)
    refused = "unknown key 'no_such_argument'" in message
    require(refused, f"a config key that is no argument of the constructor is not refused: {message}")


@check("initial weights are not what it declares")
def residual_projections_exist(name: str) -> None:
    """Check that the declared `residual_projections` are nn.Linear layers of the mixer."""
    find_residual_projections(build(name))
