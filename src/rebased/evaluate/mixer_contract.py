"""The contract of a mixer as a list of checks, for pytest and for commands.

    results = run_mixer_contract("rebased")
    failed = [result for result in results if not result.ok]

Every check builds the mixer as a model does, at a small size on the CPU, with a fixed seed.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rebased.evaluate.checks import CheckResult, NotApplicable
from rebased.mixers import (
    attention_map,
    can_extend,
    can_shard,
    check_extended,
    check_output,
    count_numbers,
    extend_documents,
    find_residual_projections,
    forward_documents,
    has_attention_map,
    init_slots,
    mixer_class,
    mixer_name,
    register_mixer,
)
from rebased.models.block import build_mixer
from rebased.models.config import LMConfig

B, T, D = 3, 21, 48  # 48 is a multiple of 1, 2, 3, 4, 6, 8, 12, 16 and 24 heads
MAX_LEN = 64
SUMS = (D, D, T, 153, D)
"""Lengths of the sums in any mixer: projection in, norm or convolution, tokens, features or states, projection out."""
CONDITION = 8.0
"""Norms, gates and denominators of a few random tokens make numbers some times larger, of which some cancel."""
MARGIN = 8.0


def tolerance(dtype: torch.dtype) -> float:
    """The largest error that passes, divided by the largest expected number (at least 1).

    A sum of n random roundings is off by about sqrt(n) unit roundoffs. A mixer in bf16 or fp16 sums in fp32, and rounds
    what it stores, some eight times in a row, each time by at most two unit roundoffs.
    """
    exact = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2
    stored = 0.0 if dtype in (torch.float32, torch.float64) else 8 * torch.finfo(dtype).eps
    return MARGIN * exact * CONDITION * sum(math.sqrt(n) for n in SUMS) + stored


SPLITS = ([21], [1] * 21, [20, 1], [1, 20], [8, 5, 1, 7], [3, 16, 2])
DOCUMENTS = [0, 1, 12, 12, 21, 42, 44, 63]  # one of a single token, an empty one and a whole row


class Check(NamedTuple):
    """One check of the contract."""

    name: str
    why: str  # what goes wrong with a mixer that fails
    function: Callable[[str], None]  # takes the name of a registered mixer; raises if it fails

    def run(self, mixer: str) -> None:
        """Run the check for a registered mixer. Raises AssertionError or ValueError if it fails, NotApplicable to skip.

        The seed is fixed. Random number streams are left as they are.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.function(mixer)


def run_mixer_contract(name: str) -> Iterator[CheckResult]:
    """The result of each check for the mixer registered under this name, in the order of CHECKS, one by one."""
    mixer_class(name)  # an unknown name is one error, at once
    return _results(name)


def _results(name: str) -> Iterator[CheckResult]:
    for check in CHECKS:
        try:
            check.run(name)
            yield CheckResult(check.name, "passed")
        except NotApplicable as reason:
            yield CheckResult(check.name, "skipped", str(reason))
        except Exception as error:
            kind = "" if isinstance(error, AssertionError | ValueError) else f"{type(error).__name__}: "
            yield CheckResult(check.name, "failed", f"{kind}{error} ({check.why})")


def keeps_shape(name: str, length: int) -> None:
    """Check that x [B,T,D] gives a finite [B,T,D], for one sequence and for several."""
    for batch in (1, B):
        y = _forward(_build(name), _inputs(batch, length))
        _require(y.isfinite().all(), f"the output at B = {batch}, T = {length} is not finite")


def keeps_dtype(name: str, dtype: torch.dtype) -> None:
    """Check that the output has the dtype of x, and the numbers it has in fp64."""
    mixer, x = _build(name), _inputs()
    other = _build(name, dtype)
    other.load_state_dict(mixer.state_dict())
    y = _forward(other, x.to(dtype))
    _require_near(y, _forward(mixer, x), f"the output in {dtype} against torch.float64")


def computes_in_bfloat16(name: str) -> None:
    """Check that bfloat16 in gives bfloat16 out, near the result in fp64."""
    mixer = _build(name, torch.bfloat16)
    exact = copy.deepcopy(mixer).double()
    x = _inputs(dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # from CPUs without bf16, which then compute anyway
        try:
            y = _forward(mixer, x)
        except RuntimeError as error:
            if "not implemented for 'BFloat16'" not in str(error):
                raise
            raise NotApplicable(f"mixer {name!r} does not compute in bfloat16") from error
    _require_near(y, _forward(exact, x.double()), "the output in torch.bfloat16 against torch.float64")


def never_looks_ahead(name: str, at: int) -> None:
    """Check that a change of x from position `at` on changes no output before it."""
    mixer, x = _build(name), _inputs()
    changed = x.clone()
    changed[:, at:] += 10 * torch.randn_like(changed[:, at:])
    before, after = _forward(mixer, x), _forward(mixer, changed)
    _require_near(after[:, :at], before[:, :at], f"the output before position {at}, after a change of x from {at} on,")
    _require(
        not torch.allclose(after[:, at:], before[:, at:]),
        f"the output from position {at} on does not change with x: the mixer does not read it",
    )


def not_finite_reaches_no_other(name: str, value: float) -> None:
    """Check that a NaN or an infinity at one token leaves earlier tokens and other rows as they are.

    A mixer that declares `spreads_nan` is asked about other rows only.
    """
    mixer, x = _build(name), _inputs()
    changed = x.clone()
    changed[0, 10, 3] = value
    before, after = _forward(mixer, x), _forward(mixer, changed)
    _require_near(after[1:], before[1:], f"other rows, with {value} in row 0,")
    if reason := getattr(mixer, "spreads_nan", None):
        raise NotApplicable(f"mixer {name!r} declares spreads_nan: {reason}")
    _require(
        after[0, :10].isfinite().all(),
        f"{value} at position 10 reaches earlier outputs; if it must, say why in a class attribute `spreads_nan`",
    )
    _require_near(after[:1, :10], before[:1, :10], f"the output before {value} at position 10")


def gradients_never_look_ahead(name: str) -> None:
    """Check that outputs before a position have no gradient in x from it on."""
    x = _inputs().requires_grad_()
    (gradient,) = torch.autograd.grad(_forward(_build(name), x)[:, :10].square().sum(), x)
    _require((gradient[:, :10] != 0).any(), "the outputs before position 10 have no gradient in x before position 10")
    largest = float(gradient[:, 10:].abs().max())
    _require(
        largest <= tolerance(torch.float64),
        f"the outputs before position 10 have a gradient of {largest:.2g} in x from position 10 on",
    )


def every_parameter_has_gradient(name: str) -> None:
    """Check that every parameter and x have a finite gradient that is not all zero, in training mode."""
    mixer = _build(name, torch.float32).train()
    x = _inputs(dtype=torch.float32).requires_grad_()
    (_forward(mixer, x) * torch.randn(B, T, D)).sum().backward()
    for key, parameter in (*mixer.named_parameters(), ("x", x)):
        _require(parameter.grad is not None, f"{key} has no gradient")
        _require(parameter.grad.isfinite().all(), f"the gradient of {key} is not finite")
        _require((parameter.grad != 0).any(), f"the gradient of {key} is zero everywhere")


def gradients_match_differences(name: str) -> None:
    """Check the gradients along one random direction through all parameters and x, against central differences."""
    mixer = _build(name)
    point = {**{f"mixer.{key}": value.detach() for key, value in mixer.named_parameters()}, "x": _inputs()}
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
    _require(
        abs(analytic - numeric) <= max(1e-5 * abs(numeric), 1e-12),
        f"the derivative by backward() is {analytic:.9g}, by central differences {numeric:.9g}",
    )


def extend_is_forward_in_pieces(name: str, pieces: list[int], dtype: torch.dtype) -> None:
    """Check that extend over pieces of these lengths gives what forward gives."""
    mixer, x = _build_extendable(name, dtype), _inputs(dtype=dtype)
    state, outputs = mixer.init_state(B), []
    for piece in x.split(pieces, dim=1):
        y, state = check_extended(mixer, piece, mixer.extend(piece, state))
        outputs.append(y)
    _require_near(torch.cat(outputs, dim=1), _forward(mixer, x), f"extend in pieces of {pieces} against forward")


def state_has_declared_size(name: str, length: int) -> None:
    """Check that the state after `length` tokens holds as many numbers as state_size says."""
    mixer, x = _build_extendable(name), _inputs(length=length)
    _, state = check_extended(mixer, x, mixer.extend(x, mixer.init_state(B)))
    actual, declared = count_numbers(state), B * mixer.state_size(length)
    _require(
        actual == declared,
        f"the state of {B} sequences of {length} tokens holds {actual} numbers; state_size says {declared}",
    )


def given_state_is_not_changed(name: str) -> None:
    """Check that extend leaves the state it was given as it is, so that it can be used again."""
    mixer, x = _build_extendable(name), _inputs()
    _, state = mixer.extend(x[:, :9], mixer.init_state(B))
    copies = [tensor.clone() for tensor in _tensors(state)]
    first, _ = mixer.extend(x[:, 9:], state)
    same = all(torch.equal(a, b) for a, b in zip(_tensors(state), copies, strict=True))
    _require(same, "extend changed the state it was given; return a new one instead")
    again, _ = mixer.extend(x[:, 9:], state)
    _require(torch.equal(first, again), "extend gave another output when it was called again with the same state")


def slots_are_extend(name: str, dtype: torch.dtype) -> None:
    """Check that steps in slots, of sequences of different lengths, give what forward gives, and extend's states."""
    mixer, x, begins = _build_extendable(name, dtype), _inputs(dtype=dtype), (4, 0, 11)
    whole = _forward(mixer, x)
    slots = init_slots(mixer, B, capacity=2)
    slots.reserve(T)
    lengths = torch.tensor(begins)
    with torch.no_grad():
        for slot, begin in enumerate(begins):
            slots.put(slot, _state_after(mixer, x[slot : slot + 1, :begin]), begin)
        for step in range(9):
            token, wanted = (
                torch.stack([each[slot, begin + step] for slot, begin in enumerate(begins)]).unsqueeze(1)
                for each in (x, whole)
            )
            y = check_output(mixer, token, slots.step(token, lengths + step, T), "a step in slots")
            _require_near(y, wanted, f"step {step} of sequences that begin after {begins} tokens against forward")
        copies = [slots.get(slot, begin + 9) for slot, begin in enumerate(begins)]
        slots.step(x[:, :1], lengths + 9, T)  # must not change what was taken out before
        for slot, begin in enumerate(begins):
            after = _state_after(mixer, x[slot : slot + 1, : begin + 9])
            for got, expected in zip(_tensors(copies[slot]), _tensors(after), strict=True):
                _require_near(
                    got, expected, f"the state in slot {slot} after {begin + 9} tokens against that of extend"
                )


def _state_after(mixer: Any, x: Tensor) -> Any:
    """Return the mixer's state after the tokens x [1,T,D]; T may be 0."""
    state = mixer.init_state(1)
    return mixer.extend(x, state)[1] if x.shape[1] else state


def shards_are_the_whole(name: str, count: int, dtype: torch.dtype) -> None:
    """Check that forward_shard over `count` shards gives the outputs and gradients of forward."""
    mixer, x = _build(name, dtype), _inputs(dtype=dtype).requires_grad_()
    if not can_shard(mixer):
        raise NotApplicable(f"mixer {name!r} has no forward_shard")
    sharded = _in_shards(mixer, list(x.chunk(count, dim=1)))
    _require_same_function(mixer, x, sharded, _forward(mixer, x), f"forward_shard over {count} shards against forward")


def documents_are_apart(name: str, dtype: torch.dtype) -> None:
    """Check that packed documents give the outputs and gradients that each gives alone."""
    mixer, x = _build(name, dtype), _inputs(dtype=dtype).requires_grad_()
    tokens = x.reshape(1, B * T, D)
    alone = [_forward(mixer, tokens[:, i:j]) for i, j in pairwise(DOCUMENTS) if i < j]
    packed = forward_documents(mixer, x, torch.tensor(DOCUMENTS, dtype=torch.int32))
    packed = check_output(mixer, x, packed, "forward_documents")
    whole = torch.cat(alone, dim=1).view(B, T, D)
    _require_same_function(mixer, x, packed, whole, "packed documents against each document alone")


def prompts_are_apart(name: str, dtype: torch.dtype) -> None:
    """Check that packed documents that follow states give the outputs and states that each gives alone."""
    mixer, x, lengths, begins = _build_extendable(name, dtype), _inputs(dtype=dtype), (1, 12, 3), (4, 0, 5)
    with torch.no_grad():
        states = [_state_after(mixer, x[row : row + 1, :begin]) for row, begin in enumerate(begins)]
        pieces = [
            x[row : row + 1, begin : begin + n] for row, (begin, n) in enumerate(zip(begins, lengths, strict=True))
        ]
        packed, after = extend_documents(mixer, torch.cat(pieces, dim=1), lengths, states)
        alone = [mixer.extend(piece, state) for piece, state in zip(pieces, states, strict=True)]
    _require_near(packed, torch.cat([y for y, _ in alone], dim=1), "packed prompts against each prompt alone")
    for number, (ours, (_, theirs)) in enumerate(zip(after, alone, strict=True)):
        for got, expected in zip(_tensors(ours), _tensors(theirs), strict=True):
            _require_near(got, expected, f"the state after packed prompt {number} against that of the prompt alone")


def rows_are_apart(name: str) -> None:
    """Check that each row of a batch gives what it gives alone."""
    mixer, x = _build(name), _inputs()
    together = _forward(mixer, x)
    for row in range(B):
        alone = _forward(mixer, x[row : row + 1])
        _require_near(together[row : row + 1], alone, f"row {row} of a batch against this row alone")


def attention_map_is_forward(name: str, dtype: torch.dtype) -> None:
    """Check that the attention matrix looks at no later token, and that with it apply_attention gives forward."""
    mixer, x = _build(name, dtype), _inputs(dtype=dtype)
    if not has_attention_map(mixer):
        raise NotApplicable(f"mixer {name!r} has no attention_map and apply_attention")
    A = attention_map(mixer, x)
    _require(A.isfinite().all(), "the attention matrix is not finite")
    _require((A.triu(1) == 0).all(), "the attention matrix looks ahead: it is not zero above the diagonal")
    y = check_output(mixer, x, mixer.apply_attention(A, x), "apply_attention")
    _require_near(y, _forward(mixer, x), "apply_attention with attention_map against forward")


def weights_decide_everything(name: str) -> None:
    """Check that in eval mode the output depends on x and the state_dict only."""
    mixer, x = _build(name), _inputs()
    first = _forward(mixer, x)
    _forward(mixer, _inputs())
    _require(
        torch.equal(first, _forward(mixer, x)),
        "in eval mode forward gave another output for the same x: it is random, or it keeps something of its last call",
    )
    other = _build(name)
    other.load_state_dict(mixer.state_dict())
    _require(
        torch.equal(first, _forward(other, x)),
        "a second mixer with the same state_dict gives another output: something it needs is not saved",
    )


def config_matches_constructor(name: str) -> None:
    """Check that a config can name the mixer, survives JSON, and refuses unknown keys."""
    config = LMConfig(d_model=D, mixers=(name,))
    _require(LMConfig.model_validate_json(config.model_dump_json()) == config, "the config changes on its way to JSON")
    _require(mixer_name(_build(name)) == name, f"the mixer built from the config is not {name!r}")
    message = _error(lambda: LMConfig(d_model=D, mixers=({"name": name, "no_such_argument": 1},)))
    _require(
        "unknown key 'no_such_argument'" in message,
        f"a config key that is no argument of the constructor is not refused: {message or 'no error'}",
    )


def name_stands_for_one_class(name: str) -> None:
    """Check that the class can be registered again under its name, and no other class can."""
    cls = mixer_class(name)
    _require(register_mixer(name)(cls) is cls, "the class cannot be registered again, as a notebook's cell does")
    message = _error(lambda: register_mixer(name)(type("Other", (nn.Module,), {})))
    _require(f"mixer {name!r} is taken by" in message, f"another class can take the name {name!r}")
    _require(mixer_class(name) is cls, f"another class took the name {name!r}")


def residual_projections_exist(name: str) -> None:
    """Check that the declared `residual_projections` are nn.Linear layers of the mixer."""
    find_residual_projections(_build(name))


def _list_checks() -> list[Check]:
    floats = (torch.float64, torch.float32)
    lengths = "some sequence lengths do not work"
    leak = "the model is trained on tokens that it must predict"
    spreads = "one bad number hides where it came from"
    gradient = "training does not follow the loss"
    generation = "generation gives other tokens than training"
    checks = [Check(f"keeps_shape[T={n}]", lengths, partial(keeps_shape, length=n)) for n in (1, 2, 7, 21, 64)]
    checks += [
        Check(
            f"keeps_dtype[{_short(dtype)}]", "the residual stream changes its dtype", partial(keeps_dtype, dtype=dtype)
        )
        for dtype in floats
    ]
    checks += [Check("computes_in_bfloat16", "it cannot be trained in bfloat16", computes_in_bfloat16)]
    checks += [Check(f"never_looks_ahead[at={n}]", leak, partial(never_looks_ahead, at=n)) for n in (1, 10, 20)]
    checks += [
        Check(f"not_finite_reaches_no_other[{value}]", spreads, partial(not_finite_reaches_no_other, value=value))
        for value in (math.nan, math.inf)
    ]
    checks += [
        Check("gradients_never_look_ahead", leak, gradients_never_look_ahead),
        Check("every_parameter_has_gradient", "a weight is never trained", every_parameter_has_gradient),
        Check("gradients_match_differences", gradient, gradients_match_differences),
    ]
    checks += [
        Check(
            f"extend_is_forward_in_pieces[{_pieces(pieces)}, {_short(dtype)}]",
            generation,
            partial(extend_is_forward_in_pieces, pieces=pieces, dtype=dtype),
        )
        for pieces, dtype in product(SPLITS, floats)
    ]
    checks += [
        Check(
            f"state_has_declared_size[T={n}]",
            "reports show a wrong state size",
            partial(state_has_declared_size, length=n),
        )
        for n in (1, 5, 21)
    ]
    checks += [Check("given_state_is_not_changed", "a prompt cannot be continued twice", given_state_is_not_changed)]
    checks += [
        Check(f"slots_are_extend[{_short(dtype)}]", generation, partial(slots_are_extend, dtype=dtype))
        for dtype in floats
    ]
    checks += [
        Check(
            f"shards_are_the_whole[n={count}, {_short(dtype)}]",
            "context parallelism trains another model",
            partial(shards_are_the_whole, count=count, dtype=dtype),
        )
        for count, dtype in product((1, 3, 7, 21), floats)
    ]
    checks += [
        Check(
            f"documents_are_apart[{_short(dtype)}]",
            "a packed document sees another one",
            partial(documents_are_apart, dtype=dtype),
        )
        for dtype in floats
    ]
    checks += [
        Check(
            f"prompts_are_apart[{_short(dtype)}]",
            "a prompt that is read together with others sees them",
            partial(prompts_are_apart, dtype=dtype),
        )
        for dtype in floats
    ]
    checks += [
        Check(
            f"attention_map_is_forward[{_short(dtype)}]",
            "a probe shows another matrix than the model uses",
            partial(attention_map_is_forward, dtype=dtype),
        )
        for dtype in floats
    ]
    checks += [
        Check("rows_are_apart", "sequences of a batch see each other", rows_are_apart),
        Check("weights_decide_everything", "results cannot be reproduced", weights_decide_everything),
        Check("config_matches_constructor", "configs cannot name it", config_matches_constructor),
        Check("name_stands_for_one_class", "a config's name has two meanings", name_stands_for_one_class),
        Check("residual_projections_exist", "initial weights are not what it declares", residual_projections_exist),
    ]
    return checks


def _build(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """Return the mixer as a model builds it, in eval mode: dropout would hide what the checks look for."""
    return build_mixer(LMConfig(d_model=D, max_len=MAX_LEN, mixers=(name,)), layer=1).to(dtype).eval()


def _build_extendable(name: str, dtype: torch.dtype = torch.float64) -> Any:
    mixer = _build(name, dtype)
    if not can_extend(mixer):
        raise NotApplicable(f"mixer {name!r} has no init_state, extend and state_size")
    return mixer


def _inputs(batch: int = B, length: int = T, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, length, D, dtype=torch.float64).to(dtype)


def _forward(mixer: nn.Module, x: Tensor) -> Tensor:
    """Return mixer(x), checked: one tensor with the shape, dtype and device of x."""
    return check_output(mixer, x, mixer(x))


def _in_shards(mixer: Any, shards: list[Tensor]) -> Tensor:
    """Return forward_shard of all shards, computed one after the other and put together: [B,T,D]."""
    sent: list[list[Tensor]] = []  # of each shard, in the order of its calls
    outputs = []
    for rank, shard in enumerate(shards):
        calls: list[Tensor] = []
        sent.append(calls)

        def gather_earlier(tensor: Tensor, calls: list[Tensor] = calls, rank: int = rank) -> Tensor:
            calls.append(tensor)
            earlier = [others[len(calls) - 1] for others in sent[:rank]]
            return torch.stack(earlier) if earlier else tensor.new_empty(0, *tensor.shape)

        outputs.append(check_output(mixer, shard, mixer.forward_shard(shard, gather_earlier), "forward_shard"))
    counts = {len(calls) for calls in sent}
    _require(len(counts) == 1, f"shards call gather_earlier {sorted(counts)} times: processes would wait forever")
    return torch.cat(outputs, dim=1)


def _require_same_function(mixer: nn.Module, x: Tensor, actual: Tensor, expected: Tensor, what: str) -> None:
    """Check that two outputs agree, and so do their gradients in x and in every parameter."""
    leaves = {"x": x, **dict(mixer.named_parameters())}
    weights = torch.randn(expected.shape, dtype=expected.dtype)
    actual_grads, expected_grads = (
        torch.autograd.grad((y * weights).sum(), list(leaves.values())) for y in (actual, expected)
    )
    _require_near(actual, expected, what)
    for key, got, wanted in zip(leaves, actual_grads, expected_grads, strict=True):
        _require_near(got, wanted, f"{what}: the gradient of {key}")


def _require_near(actual: Tensor, expected: Tensor, what: str) -> None:
    _require(actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}")
    largest = max(1.0, float(expected.detach().abs().max()))
    error = float((actual.detach().double() - expected.detach().double()).abs().max()) / largest
    most = tolerance(actual.dtype)
    _require(error <= most, f"{what}: off by {error:.2g} of the largest number; at most {most:.2g} is allowed")


def _require(condition: bool | Tensor, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _error(call: Callable[[], Any]) -> str:
    """Return the message of the ValueError that a call raises; empty if it raises none."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for child in children for tensor in _tensors(child)]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pieces(pieces: list[int]) -> str:
    return "+".join(map(str, pieces)) if len(pieces) < T else "1s"


CHECKS: tuple[Check, ...] = tuple(_list_checks())
"""All checks of the contract, from the simplest on."""
