"""Compression: the rows are their labels, and a model that is trained on them sees the last position alone."""

import pytest
import torch
from scipy.stats import chisquare

from rebased.models import LanguageModel
from rebased.models.readout import LastReadout, sinusoids
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.tasks import Compression

QUICK = {"name": "compression", "size": "quick"}


def test_rows_are_their_labels() -> None:
    task = Compression(seq_len=6, vocab_size=5)
    inputs, labels, _ = task.build(4_000, seed=1)
    assert torch.equal(inputs, labels)
    assert (inputs[:, -1] == 4).all()
    assert inputs[:, :-1].max() == 3
    for column in range(5):
        assert chisquare(inputs[:, column].bincount(minlength=4)).pvalue > 1e-3
    assert task.count() == 4**5
    assert task.chance() == pytest.approx((1 + 5 / 4) / 6)


def test_all_logits_come_from_the_last_position() -> None:
    config = SyntheticRunConfig.model_validate({"task": QUICK, "model": {"d_model": 16, "mixers": ["short_conv"]}})
    assert config.model.readout == "last"
    model = LanguageModel(config.model).double().eval()
    tokens = config.task.build(0).test[0].inputs[:3]
    seen: list[torch.Tensor] = []
    hook = model.norm.register_forward_hook(lambda *args: seen.append(args[-1]))
    everything = model(tokens)
    hook.remove()
    (features,) = seen
    assert model.readout is not None
    last = features * (torch.arange(7) == 6).unsqueeze(1)  # all other positions are 0
    assert torch.equal(model.logits(model.readout(last)), everything)
    assert not torch.allclose(everything[:, 0], everything[:, 1])  # positions are told apart
    positions = torch.tensor([[2, 6]] * 3)
    assert torch.equal(model.logits(model.hidden_at(tokens, positions)), everything[:, [2, 6]].flatten(0, 1))
    with pytest.raises(ValueError, match="it can be trained, but not generate"):
        model.init_state(1)


def test_positions_are_sinusoids() -> None:
    table = sinusoids(50, 7)
    assert table.shape == (50, 7)
    assert table[3, 0] == pytest.approx(float(torch.tensor(3.0).sin()))
    assert len(table.unique(dim=0)) == 50
    assert LastReadout(7)(torch.randn(2, 5, 7)).shape == (2, 5, 7)


def test_the_readout_belongs_to_the_task() -> None:
    with pytest.raises(ValueError, match=r"model.readout is 'each'; task 'compression' needs 'last'"):
        SyntheticRunConfig.model_validate({"task": QUICK, "model": {"readout": "each"}})
    with pytest.raises(ValueError, match=r"model.readout is 'last'; task 'mqar' needs 'each'"):
        SyntheticRunConfig.model_validate({"task": {"size": "quick"}, "model": {"readout": "last"}})
