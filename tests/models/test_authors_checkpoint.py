"""The layout of the paper's released checkpoint: there and back, and what a wrong file is told."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rebased.cli.lm_import import lm_import
from rebased.models import LanguageModel, LMConfig, preset
from rebased.models.authors_checkpoint import authors_layout, read_authors_checkpoint
from rebased.models.weights import load_model

CONFIG = LMConfig(
    vocab_size=40,
    d_model=16,
    n_layers=4,
    max_len=32,
    mixers=("short_conv", {"name": "rebased", "n_heads": 2, "key_width": 4, "value_width": 8}),
    mlp_ratio=4,
    embed_dropout=0.0,
)


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(CONFIG).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    return model


@pytest.fixture
def weights(model: LanguageModel) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in authors_layout(model).items()}


def test_names_are_those_of_the_released_checkpoint() -> None:
    names = list(authors_layout(LanguageModel(preset("lm-paper-checkpoint-rebased", d_model=64, vocab_size=9))))
    layers = [f"backbone.layers.{i}." for i in range(18)]
    both = ["norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"]
    both += [f"state_mixer.{part}" for part in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")]
    conv = [f"sequence_mixer.mixer.{p}" for p in ("projection.weight", "projection.bias")]
    conv += ["sequence_mixer.mixer.conv.conv.weight", "sequence_mixer.mixer.conv.conv.bias"]
    linear = [f"sequence_mixer.mixer.{p}.weight" for p in ("proj_q", "proj_k", "proj_v", "proj_o", "ln_q", "ln_k")]
    linear += [f"sequence_mixer.mixer.{p}.bias" for p in ("ln_q", "ln_k")]
    expected = [
        "backbone.embeddings.word_embeddings.weight",
        "backbone.embeddings.position_embeddings.weight",
        "backbone.ln_f.weight",
        "backbone.ln_f.bias",
        "lm_head.weight",
        *(layer + part for i, layer in enumerate(layers) for part in both + (linear if i % 2 else conv)),
    ]
    assert sorted(names) == sorted(expected)


def write(path: Path, weights: dict[str, Tensor]) -> Path:
    if path.suffix == ".safetensors":
        save_file(weights, path)
    else:
        torch.save({"state_dict": weights}, path)
    return path


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("with_head", [True, False])
def test_there_and_back(
    model: LanguageModel, weights: dict[str, Tensor], tmp_path: Path, name: str, with_head: bool
) -> None:
    if not with_head:
        del weights["lm_head.weight"]
    write(tmp_path / name, weights)
    for path in (tmp_path / name, tmp_path):
        read = read_authors_checkpoint(path, n_heads=2)
        assert read.config == CONFIG
        again = authors_layout(read)
        assert all(torch.equal(again[name], weight) for name, weight in weights.items())
    tokens = torch.randint(40, (2, 9))
    assert torch.equal(read(tokens), model(tokens))


def test_based_and_half_precision(tmp_path: Path) -> None:
    config = LMConfig.model_validate(
        CONFIG.model_dump() | {"mixers": ("based",), "n_layers": 3, "mlp_ratio": 0, "d_model": 24}
    )
    model = LanguageModel(config)
    weights = {name: weight.half() for name, weight in authors_layout(model).items()}
    read = read_authors_checkpoint(write(tmp_path / "m.safetensors", weights))
    assert [mixer.name for mixer in read.config.mixers] == ["based"]  # 192 wide: the paper's 12 heads of 16
    assert read.config.mixers[0].arguments()["n_heads"] == 12
    assert all(
        w.dtype == torch.float32 and torch.equal(w, weights[name].float()) for name, w in authors_layout(read).items()
    )


def test_a_wrong_file_names_everything_that_is_wrong(weights: dict[str, Tensor], tmp_path: Path) -> None:
    for name in ("backbone.ln_f.bias", "backbone.layers.1.sequence_mixer.mixer.proj_k.weight"):
        del weights[name]
    weights["backbone.layers.0.sequence_mixer.mixer.extra"] = torch.zeros(1)
    weights["backbone.layers.2.norm1.weight"] = torch.zeros(3)
    weights["backbone.layers.3.norm1.weight"] = torch.zeros(16, dtype=torch.int8)
    with pytest.raises(ValueError) as error:
        read_authors_checkpoint(write(tmp_path / "m.safetensors", weights), n_heads=2)
    assert str(error.value).endswith(
        "2 missing: backbone.layers.1.sequence_mixer.mixer.proj_k.weight, backbone.ln_f.bias; "
        "1 unexpected: backbone.layers.0.sequence_mixer.mixer.extra; "
        "1 of another shape: backbone.layers.2.norm1.weight ([3] instead of [16]); "
        "1 not floating: backbone.layers.3.norm1.weight (torch.int8)"
    )


def test_heads_that_nobody_told(weights: dict[str, Tensor], tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", weights)
    with pytest.raises(ValueError, match=r"queries are 8 and values 16 wide, .* give the number of heads"):
        read_authors_checkpoint(path)
    with pytest.raises(ValueError, match=r"\(not 3\)"):
        read_authors_checkpoint(path, n_heads=3)


class Harm:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("1/0",)


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    torch.save({"state_dict": Harm()}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="no code in it was executed"):
        read_authors_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"), [({}, "has no backbone.layers"), ([1], "holds no state dict"), ({"a": 1}, "no state dict")]
)
def test_files_that_are_something_else(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=re.escape(message)):
        read_authors_checkpoint(tmp_path)


def test_an_empty_file_and_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds none of"):
        read_authors_checkpoint(tmp_path)
    (tmp_path / "model.pt").touch()
    with pytest.raises(ValueError, match="neither a safetensors file nor a state dict"):
        read_authors_checkpoint(tmp_path)


def test_a_head_of_its_own_is_refused(weights: dict[str, Tensor], tmp_path: Path) -> None:
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    with pytest.raises(ValueError, match="tied to its embedding"):
        read_authors_checkpoint(write(tmp_path / "m.safetensors", weights), n_heads=2)


def test_models_that_the_layout_cannot_hold() -> None:
    with pytest.raises(ValueError, match="no attention"):
        authors_layout(LanguageModel(preset("conv_attention", d_model=16)))
    for odd in ({"norm_axis": "per_head"}, {"conv_width": 4}, {"output_gate": "silu"}):
        with pytest.raises(ValueError, match="paper's ReBased only"):
            authors_layout(LanguageModel(LMConfig(mixers=({"name": "rebased", "n_heads": 2, **odd},))))


def test_the_command(
    weights: dict[str, Tensor], model: LanguageModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "m.safetensors", weights)
    assert lm_import(path, out=tmp_path / "model", n_heads=2) == 0
    assert "4 layers (short_conv rebased), width 16, 32 positions, vocabulary 40" in capsys.readouterr().out
    tokens = torch.randint(40, (2, 9))
    assert torch.equal(load_model(tmp_path / "model")(tokens), model(tokens))
    with pytest.raises(ValueError, match="is there already"):
        lm_import(path, out=tmp_path / "model", n_heads=2)
    with pytest.raises(ValueError, match="does not exist"):
        lm_import(tmp_path / "nothing", out=tmp_path / "other")
