"""Every MQAR preset: it trains, extend gives what forward gives, and its config survives JSON."""

import pytest
import torch

from rebased.models import LanguageModel, LMConfig, preset
from rebased.models.presets import mqar_preset_names
from tolerances import assert_near

B, T, VOCAB = 2, 16, 64


@pytest.mark.parametrize("name", mqar_preset_names())
def test_reads_in_pieces_what_it_reads_at_once(name: str) -> None:
    torch.manual_seed(0)
    model = LanguageModel(preset(name, d_model=24, vocab_size=VOCAB, max_len=T)).double().eval()
    tokens = torch.randint(VOCAB, (B, T))
    state, outputs = model.init_state(B), []
    for piece in tokens.split([1, 6, 2, 7], dim=1):
        hidden, state = model.extend(piece, state)
        outputs.append(hidden)
    assert_near(torch.cat(outputs, dim=1), model.hidden(tokens), *(24, 24, T, 24) * 2, 24)  # two layers, the last norm
    assert state.position == T


@pytest.mark.parametrize("name", mqar_preset_names())
def test_learns_to_copy(name: str) -> None:
    """Thirty steps on the label "the token itself": the loss falls well below that of guessing."""
    torch.manual_seed(0)
    config = preset(name, d_model=24, vocab_size=VOCAB, max_len=T)
    assert LMConfig.model_validate_json(config.model_dump_json()) == config
    model = LanguageModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        tokens = torch.randint(VOCAB, (16, T))
        optimizer.zero_grad()
        loss = model.loss(tokens, tokens)
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.6 * float(torch.tensor(VOCAB).log())
