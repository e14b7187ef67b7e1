"""Norms and similarities beyond the paper's: the equation written out in fp64, with gradients, and the contract."""

import pytest
import torch
from torch import Tensor, nn

from rebased.evaluate.mixer_checks import CHECKS
from rebased.mixers import ReBased, register_mixer
from rebased.models import LMConfig
from tolerances import FIRST_TOKEN, assert_near, assert_small_error

B, T, D, H, K = 2, 11, 24, 3, 4
SUMS = (D, H * K, K, K * (K + 1) // 2, T, B * T * D)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def build(**arguments: object) -> ReBased:
    """The mixer in fp64, with random gamma, beta and logits."""
    mixer = ReBased(D, n_heads=H, key_width=K, **arguments).double()  # type: ignore[arg-type]
    for parameter in mixer.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter)
    return mixer


def normalised(x: Tensor, norm: str) -> Tensor:
    """Over the last axis, as the docstring says, with eps 1e-5 in the mean of the squares."""
    if norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    scaled = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled / x.shape[-1] ** 0.5 if norm == "l2" else scaled


def written_out(mixer: ReBased, x: Tensor) -> Tensor:
    """The mixer as its docstring says: x [B,T,D] -> [B,T,D]."""
    heads = []
    for part, norm in ((mixer.proj_q(x), mixer.ln_q), (mixer.proj_k(x), mixer.ln_k)):
        y = part.unflatten(-1, (H, K))
        if mixer.norm_axis == "joint":
            y = normalised(part, mixer.norm).unflatten(-1, (H, K))
        else:
            y = normalised(y, mixer.norm)
        shape = (K,) if mixer.norm_axis == "per_head" else (H, K)
        heads.append(norm.weight.view(shape) * y + norm.bias.view(shape))
    s = torch.einsum("bihk,bjhk->bhij", *heads) / K**0.5
    if mixer.kernel == "fourth":
        sim = s**4
    elif mixer.kernel == "learned":
        a, r, b = mixer.kernel_logits
        c0, c2 = (1 + a.exp()).log(), (1 + b.exp()).log()
        sim = c0 + 2 * (c0 * c2).sqrt() / (1 + (-r).exp()) * s + c2 * s**2
    else:
        sim = s**2
    sim = sim.tril()
    v = mixer.proj_v(x).unflatten(-1, (H, D // H))
    o = torch.einsum("bhij,bjhv->bihv", sim / (sim.sum(-1, keepdim=True) + mixer.eps), v)
    return mixer.proj_o(o.flatten(-2))


CASES = [
    {"norm": norm, "norm_axis": axis} for norm in ("layer", "rms", "l2") for axis in ("joint", "each_head", "per_head")
]
CASES += [{"kernel": "fourth"}, {"kernel": "learned"}, {"kernel": "learned", "norm": "rms", "norm_axis": "each_head"}]


@pytest.mark.parametrize("arguments", CASES, ids=str)
def test_values_and_gradients(arguments: dict[str, str]) -> None:
    mixer = build(**arguments)
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    leaves = (x, *mixer.parameters())
    y, expected = mixer(x), written_out(mixer, x)
    weights = torch.randn_like(y)
    found, wanted = (torch.autograd.grad((each * weights).sum(), leaves) for each in (y, expected))
    # A fourth power divides by smaller numbers than a square: the smallest similarity of the first token is squared.
    condition = FIRST_TOKEN**2 if arguments.get("kernel") == "fourth" else FIRST_TOKEN
    assert_near(y, expected, *SUMS, condition=condition)
    for got, want in zip(found, wanted, strict=True):
        assert_near(got, want, *SUMS, condition=condition)


def test_learnt_coefficients_begin_as_baseds_and_make_no_similarity_negative() -> None:
    start = ReBased(D, n_heads=H, key_width=K, kernel="learned").operator_coefficients()
    torch.testing.assert_close(start, torch.tensor([1.0, 1.0, 0.5]), rtol=1e-5, atol=1e-5)
    s = torch.linspace(-50, 50, 2001, dtype=torch.float64)
    for _ in range(20):
        mixer = build(kernel="learned")
        c = mixer.operator_coefficients()
        assert (c >= 0).all()
        assert (mixer.similarity(s) >= -1e-12).all()
        with torch.no_grad():
            mixer.kernel_logits.mul_(5)
        assert (mixer.similarity(s) >= -1e-9).all()


def test_sizes_and_refusals() -> None:
    fourth = ReBased(D, n_heads=H, key_width=5, kernel="fourth")
    assert fourth.operator_width == 15
    assert fourth.state_size(7) == H * 120 * (D // H + 1)
    assert ReBased(D, n_heads=H, key_width=K, kernel="learned").state_size(7) == H * (1 + 4 + 10) * (D // H + 1)
    with pytest.raises(ValueError, match=r"makes 136 products of key_width 16, more than the 128 .* at most 15"):
        ReBased(D, n_heads=H, kernel="fourth")
    for arguments, message in (
        ({"norm": "batch"}, "norm 'batch' is unknown"),
        ({"kernel": "cubic"}, "kernel 'cubic' is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            ReBased(D, n_heads=H, key_width=K, **arguments)  # type: ignore[arg-type]


def test_defaults_keep_their_digests() -> None:
    """New arguments are left out of a digest while they have their defaults, and are in it otherwise."""
    plain = LMConfig(d_model=D, mixers=("short_conv", {"name": "rebased", "n_heads": H}))
    told = {"name": "rebased", "n_heads": H, "norm": "layer", "kernel": "square"}
    assert LMConfig(d_model=D, mixers=("short_conv", told)).digest() == plain.digest()
    assert LMConfig(d_model=D, mixers=("short_conv", told | {"norm": "rms"})).digest() != plain.digest()


ABOUT_THE_KERNEL = (
    *("never_looks_ahead", "every_parameter", "extend_is_forward", "state_has", "shards_are", "documents_are"),
    "attention_map_is_forward",
)


class Fourth(ReBased):
    def __init__(self, d_model: int) -> None:
        super().__init__(d_model, n_heads=2, key_width=3, kernel="fourth", norm="l2", norm_axis="each_head")


class Learned(ReBased):
    def __init__(self, d_model: int) -> None:
        super().__init__(d_model, n_heads=2, key_width=4, kernel="learned", norm="rms")


@pytest.mark.parametrize("cls", [Fourth, Learned])
def test_the_contract_holds(cls: type[ReBased]) -> None:
    cls.added_later = ()
    register_mixer("under_test")(cls)
    with torch.random.fork_rng(devices=[]):
        for check in CHECKS:
            if "float32" not in check.name and check.name.startswith(ABOUT_THE_KERNEL):
                check.run("under_test")


@pytest.mark.gpu
def test_learnt_coefficients_take_the_kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = build(kernel="learned").cuda()
    x = torch.randn(B, T, D, device="cuda")
    expected = mixer(x.double())  # fp64 has no kernels
    monkeypatch.setattr("rebased.ops.polynomial.chunked.forward", None)
    assert_small_error([mixer.float()(x)], [expected], ["y"], torch.float32)
