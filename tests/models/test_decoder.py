"""The decoder: steps in slots are teacher forcing, for every mixer, alone and in ragged batches; memory is flat."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rebased.mixers import can_extend, mixer_class, mixer_names, register_mixer, tensors_of
from rebased.models import Decoder, LanguageModel, LMConfig, Sampling, preset
from rebased.models.block import build_mixer
from rebased.models.fused_step import can_fuse
from tolerances import assert_near

VOCAB, D = 29, 24
GREEDY = Sampling(temperature=0.0)
ARGUMENTS: dict[str, dict[str, Any]] = {
    "rebased": {"n_heads": 3, "key_width": 4},
    "based": {"n_heads": 3, "key_width": 4},
    "attention": {"n_heads": 3},
    "sliding_window": {"n_heads": 3, "window": 5},
}
OURS = [name for name in mixer_names() if mixer_class(name).__module__.startswith("rebased.")]
MIXERS = [
    *({"name": name, **ARGUMENTS.get(name, {})} for name in OURS),
    {"name": "delta_rebased", "delta": False, "gate": True},
    {"name": "sliding_window", "n_heads": 3, "window": 5, "rotary": True},
    {"name": "sliding_window", "window": 1},
    {"name": "sliding_window", "window": 64},
]
SUMS = (D, D, 40, 153, D, 2 * D) * 2 + (D, D)
"""Of two layers and the head: a norm, projections, tokens, features, a projection, an MLP; a norm, the logits."""
TEXT = [[(3 * i + 5 * j) % VOCAB for i in range(40)] for j in range(4)]


def build(*mixers: Any, dtype: torch.dtype = torch.float64, **changes: Any) -> LanguageModel:
    """A small model in eval mode whose weights are all random, norms and biases too."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "d_model": D, "max_len": 64, "mlp_ratio": 2, "n_layers": max(2, len(mixers))}
    model = LanguageModel(LMConfig(mixers=mixers, **(shape | changes))).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.to(dtype)


def read(decoder: Decoder, starts: list[int], steps: int) -> Tensor:
    """Logits [S,steps,V] where the decoder is made to read TEXT, each slot from its own start on."""
    for slot, start in enumerate(starts):
        decoder.put(slot, TEXT[slot][: start + 1], decoder.prefill(TEXT[slot][:start]), GREEDY)
    logits = []
    for step in range(1, steps + 1):
        decoder.step()
        logits.append(decoder.logits.clone())
        for slot, start in enumerate(starts):
            decoder.tokens[slot] = TEXT[slot][start + step]
    return torch.stack(logits, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("mixer", MIXERS, ids=str)
def test_decoding_is_teacher_forcing(mixer: dict[str, Any], dtype: torch.dtype) -> None:
    """Every position after the prompts, in one ragged batch; one slot begins without any token before."""
    model, starts = build(mixer, dtype=dtype), [3, 0, 17, 1]
    with torch.no_grad():
        want = model(torch.tensor(TEXT))
    got = read(Decoder(model, slots=4, capacity=8), starts, steps=10)
    for slot, start in enumerate(starts):
        assert_near(got[slot], want[slot, start : start + 10], *SUMS, condition=8.0, name=f"slot {slot}")


ABLATIONS = [
    {"name": "rebased", "n_heads": 3, "key_width": 4, **changes}
    for changes in (
        *({"qk_transform": each} for each in ("none", "norm", "scale", "affine")),
        {"norm": "rms"},
        {"norm": "l2"},
        {"norm": "rms", "norm_axis": "each_head"},
        {"norm_axis": "each_head"},
        {"norm_axis": "per_head"},
        {"kernel": "fourth"},
        {"kernel": "learned"},
    )
]


@pytest.mark.parametrize("mixer", [*MIXERS, *ABLATIONS], ids=str)
def test_fused_steps_are_the_steps(mixer: dict[str, Any]) -> None:
    """The same text in a ragged batch, a slot of which is full of NaN; and what the sequences leave in their slots."""
    model = build("short_conv", mixer, dtype=torch.float32)
    logits, states = [], []
    for fusion in ("none", "kernels"):
        decoder = Decoder(model, slots=4, capacity=32, fusion=fusion)  # type: ignore[arg-type]
        if not hasattr(model.blocks[1].mixer, "spreads_nan"):
            for tensor in (tensor for layer in decoder.layers for tensor in layer.tensors()):
                tensor[3] = torch.nan
        logits.append(read(decoder, [3, 0, 17], steps=6)[:3])
        states.append([tensor for slot in range(3) for tensor in tensors_of(decoder.get(slot).layers)])
    assert_near(*reversed(logits), *SUMS, condition=8.0)
    for ours, theirs in zip(*reversed(states), strict=True):
        assert_near(ours, theirs, *SUMS, condition=8.0)


def test_fusion_sees_what_was_changed() -> None:
    """Hooks and subclasses of a layer count: such a layer is called, not read."""
    model = build("short_conv", {"name": "rebased", "n_heads": 3}, "attention", dtype=torch.float32)
    called: list[str] = []
    for name in ("blocks.0.mixer.projection", "blocks.1.mixer.proj_v", "blocks.2.mixer.qkv", "blocks.1.mlp.fc1"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    decoder = Decoder(model, slots=1, fusion="kernels")
    decoder.put(0, [1], decoder.prefill([]), GREEDY)
    decoder.step()
    assert called == ["blocks.0.mixer.projection", "blocks.1.mixer.proj_v", "blocks.1.mlp.fc1", "blocks.2.mixer.qkv"]
    model.blocks[0].mlp.register_forward_hook(lambda *_: called.append("mlp"))
    decoder.step()
    assert called.count("mlp") == 1

    class Capped(LanguageModel):
        def logits(self, hidden: Tensor) -> Tensor:
            return super().logits(hidden).tanh()

    assert can_fuse(model)
    assert not can_fuse(Capped(model.config))
    with pytest.raises(ValueError, match="take bf16, fp16 or fp32, one dtype for all weights"):
        Decoder(build("short_conv"), slots=1, fusion="kernels")
    assert Decoder(model, slots=1).fusion == "none"  # on a CPU plain torch is as fast


@pytest.mark.parametrize("mixer", MIXERS, ids=str)
def test_a_slot_gives_what_the_sequence_gives_alone(mixer: dict[str, Any]) -> None:
    model, starts = build(mixer), [3, 0, 17, 1]
    together = read(Decoder(model, slots=4), starts, steps=4)
    for slot, start in enumerate(starts):
        decoder = Decoder(model, slots=1)
        decoder.put(0, TEXT[slot][: start + 1], decoder.prefill(TEXT[slot][:start]), GREEDY)
        decoder.step()
        assert_near(decoder.logits[0], together[slot, 0], *SUMS, condition=8.0)


@pytest.mark.parametrize("mixer", MIXERS, ids=str)
def test_a_state_taken_from_a_slot_is_that_of_extend(mixer: dict[str, Any]) -> None:
    """Taken after prefill and after steps, into a slot that another sequence has used before."""
    model = build(mixer)
    decoder = Decoder(model, slots=2)
    decoder.put(1, TEXT[1][:30], decoder.prefill(TEXT[1][:29]), GREEDY)
    decoder.step()
    decoder.free(1)
    decoder.put(1, TEXT[0][:4], decoder.prefill(TEXT[0][:3]), GREEDY)
    for length in (3, 4, 12):
        while int(decoder.lengths[1]) < length:
            decoder.step()
            decoder.tokens[1] = TEXT[0][int(decoder.lengths[1])]
        got, want = decoder.get(1), decoder.prefill(TEXT[0][:length])
        assert got.position == want.position == length
        for ours, theirs in zip(tensors_of(got.layers), tensors_of(want.layers), strict=True):
            assert ours.dtype == theirs.dtype
            assert_near(ours, theirs, *SUMS, condition=8.0)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # from CPUs without bf16, which then compute anyway
def test_half_precision_decodes_to_its_accuracy() -> None:
    """bf16 in slots against bf16 in one pass. Each of four layers stores some three numbers in a row: 12 roundings."""
    window = {"name": "sliding_window", "n_heads": 3, "window": 5, "rotary": True}
    model = build("short_conv", {"name": "rebased", "n_heads": 3}, "attention", window, dtype=torch.bfloat16)
    with torch.no_grad():
        want = model(torch.tensor(TEXT))
    got = read(Decoder(model, slots=4), [3, 0, 17, 1], steps=6)
    for slot, start in enumerate((3, 0, 17, 1)):
        assert_near(got[slot], want[slot, start : start + 6], *SUMS, condition=8.0, roundings=12)


def test_prefill_in_chunks_and_after_a_prefix() -> None:
    model = build("short_conv", {"name": "rebased", "n_heads": 3}, "attention")
    decoder = Decoder(model, slots=1)
    whole = decoder.prefill(TEXT[0])
    *_, chunked = decoder.prefill_chunks(TEXT[0], chunk=7)
    prefix = decoder.prefill(TEXT[0][:20])
    continued = [decoder.prefill(TEXT[0][20:], prefix) for _ in range(2)]
    for other in (chunked, *continued):
        assert other.position == whole.position == 40
        for ours, theirs in zip(tensors_of(other.layers), tensors_of(whole.layers), strict=True):
            assert_near(ours, theirs, *SUMS, condition=8.0)
    assert decoder.prefill([]).position == 0
    assert decoder.prefill([], prefix) is prefix
    assert decoder.prefill_chunk == 4096
    decoder.model = LanguageModel(preset("lm-paper-text-rebased"), device="meta", dtype=torch.bfloat16)
    assert decoder.prefill_chunk == 4096  # attention is still there
    decoder.layers = decoder.layers[:2]
    assert decoder.prefill_chunk == 32_768  # where a chunk is many kernels to launch
    decoder.model = LanguageModel(LMConfig(d_model=8192, mlp_ratio=8, mixers=("short_conv",)), device="meta")
    assert decoder.prefill_chunk == 4096


@pytest.mark.parametrize("mixer", MIXERS, ids=str)
def test_prompts_read_together_are_those_read_alone(mixer: dict[str, Any]) -> None:
    """Of different lengths; from the beginning, and after states of different lengths."""
    model = build("short_conv", mixer)
    decoder = Decoder(model, slots=1)
    prompts = [TEXT[0][:7], TEXT[1][:1], TEXT[2][:33]]
    prefixes = [decoder.prefill(TEXT[3][:length]) for length in (0, 9, 2)]
    for before in ([model.init_state(1)] * 3, prefixes):
        _, together = model.extend_documents(prompts, before)
        for number, prompt in enumerate(prompts):
            alone = decoder.prefill(prompt, before[number])
            assert together[number].position == alone.position
            for ours, theirs in zip(tensors_of(together[number].layers), tensors_of(alone.layers), strict=True):
                assert_near(ours, theirs, *SUMS, condition=8.0)
    features, states = model.extend_documents(prompts[:2], prefixes[:2])
    want, _ = model.extend(torch.tensor([prompts[1]]), prefixes[1])
    assert_near(features[1], want[0], *SUMS, condition=8.0)
    assert [state.position for state in states] == [7, 10]
    with pytest.raises(ValueError, match=r"2 states do not fit documents of \[7\] tokens"):
        model.extend_documents(prompts[:1], prefixes[:2])
    with pytest.raises(ValueError, match="72 tokens are more than the 64 learned positions"):
        model.extend_documents([TEXT[0], [1]], [decoder.prefill(TEXT[1][:32]), prefixes[0]])


@pytest.mark.parametrize("linear", ["rebased", "based"])
def test_memory_is_flat(linear: str) -> None:
    """Neither the states nor what a step allocates grows with the number of tokens."""
    mixers = ("short_conv", {"name": linear, "n_heads": 3, "key_width": 4}, {"name": "sliding_window", "window": 4})
    model = build(*mixers, dtype=torch.float32, positions="none")
    decoder = Decoder(model, slots=3, capacity=8)  # far fewer than it will read: nothing here has a cache that grows
    states, places, made = [], [], []
    for slot in range(3):
        decoder.put(slot, [slot], decoder.prefill([]), Sampling(seed=slot))
    for _ in range(24):
        with Allocated() as allocated:
            decoder.step()
        made.append(allocated.bytes)
        states.append(decoder.state_bytes)
        places.append([tensor.data_ptr() for layer in decoder.layers for tensor in layer.tensors()])
    assert len({*states}) == len({*made[1:]}) == 1  # the first step also makes what is cached for all later ones
    assert places[0] == places[-1]
    assert states[0] == 4 * 3 * (model.state_size(10**6) + 2 * D)  # a ring has one column more than the state


class Allocated(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes of all tensors that operations return while it is active."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.bytes += sum(tensor.nbytes for tensor in tensors_of(out))
        return out


def test_caches_of_attention_stay_where_they_are_until_they_are_full() -> None:
    model = build("attention", dtype=torch.float32, positions="none")
    decoder = Decoder(model, slots=2, capacity=16)
    decoder.put(0, [1], decoder.prefill([]), GREEDY)
    pointers = []
    for _ in range(40):
        decoder.step()
        pointers.append(decoder.layers[0].tensors()[0].data_ptr())
    assert len(set(pointers[:16])) == len(set(pointers[16:32])) == 1
    assert decoder.capacity == 64
    fixed = Decoder(model, slots=1, capacity=3, grows=False)
    fixed.put(0, [1], fixed.prefill([]), GREEDY)
    for _ in range(3):
        fixed.step()
    with pytest.raises(ValueError, match=r"4 tokens does not fit into a capacity of 3; .* capacity=4"):
        fixed.step()


def test_a_decoder_made_in_inference_mode_works_outside_of_it() -> None:
    model = build("short_conv", "attention", "rwkv")
    with torch.inference_mode():
        decoder = Decoder(model, slots=1, capacity=2)
        decoder.put(0, TEXT[0][:2], decoder.prefill(TEXT[0][:1]), GREEDY)
        decoder.step()
        decoder.step()  # the cache grows
    assert decoder.step().tokens.shape == (1,)


def test_unused_slots_change_nothing() -> None:
    model = build("short_conv", "attention", {"name": "sliding_window", "window": 3}, "hyena")
    alone, among = Decoder(model, slots=3, capacity=8), Decoder(model, slots=3, capacity=8)
    for decoder in (alone, among):
        decoder.put(1, TEXT[0][:4], decoder.prefill(TEXT[0][:3]), Sampling(seed=3))
    among.put(0, TEXT[1][:30], among.prefill(TEXT[1][:29]), Sampling(seed=4))
    for step in range(12):
        one, other = alone.step(), among.step()
        assert int(one.tokens[1]) == int(other.tokens[1])
        if step == 3:
            among.free(0)
    assert among.lengths.tolist() == [33, 15, 0]


def test_a_mixer_of_ones_own_decodes_row_by_row() -> None:
    """Its state grows, or has no rows: each sequence is stepped by itself."""

    @register_mixer("running_list")
    class RunningList(nn.Module):
        def __init__(self, d_model: int) -> None:
            super().__init__()
            self.proj = nn.Linear(d_model, d_model)

        def forward(self, x: Tensor) -> Tensor:
            return self.extend(x, self.init_state(len(x)))[0]

        def init_state(self, batch: int, *, device: Any = None, dtype: Any = None) -> list[Tensor]:
            return []

        def extend(self, x: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            state = [*state, *self.proj(x).unbind(1)]
            sums = torch.stack(state, 1).cumsum(1)[:, -x.shape[1] :]
            return sums, state

        def state_size(self, seq_len: int) -> int:
            return seq_len * D

    model = build("running_list")
    assert can_extend(build_mixer(model.config, 0))
    with torch.no_grad():
        want = model(torch.tensor(TEXT))
    got = read(Decoder(model, slots=4), [3, 0, 17, 1], steps=5)
    for slot, start in enumerate((3, 0, 17, 1)):
        assert_near(got[slot], want[slot, start : start + 5], *SUMS, condition=8.0)


def test_errors() -> None:
    model = build("attention")
    with pytest.raises(ValueError, match=r"training mode.*call model.eval\(\) first"):
        Decoder(model.train(), slots=1)
    decoder = Decoder(model.eval(), slots=1)
    with pytest.raises(ValueError, match="the state has read 0 tokens; a sequence of 2 needs one that has read all"):
        decoder.put(0, [1, 2], decoder.prefill([]), GREEDY)
    with pytest.raises(ValueError, match="0 slots of 1024 tokens hold nothing"):
        Decoder(model, slots=0)
    decoder.put(0, TEXT[0] + TEXT[1][:24], decoder.prefill(TEXT[0] + TEXT[1][:23]), GREEDY)
    decoder.step()
    with pytest.raises(ValueError, match="a slot has read all 64 positions of the model; free it"):
        decoder.step()


@pytest.mark.parametrize("mixer", [{"name": "rebased", "n_heads": 3}, {"name": "attention", "n_heads": 3}], ids=str)
def test_a_narrow_step_computes_the_slots_in_use(mixer: dict[str, Any]) -> None:
    """Sequences come and leave; each gets the tokens that it gets where all slots are computed."""
    model = build(mixer)
    plain, narrow = Decoder(model, 20, capacity=64), Decoder(model, 20, capacity=64, narrow=True)
    shapes = []
    for slot in (0, 2, 5, 17, 1):
        made = []
        for decoder in (plain, narrow):
            decoder.put(
                slot, TEXT[slot % 3][: slot + 3], decoder.prefill(TEXT[slot % 3][: slot + 2]), Sampling(seed=slot)
            )
            decoder.step()
            made.append(decoder.step())
        used = plain._active.nonzero()[0]
        shapes.append(len(made[1].tokens))
        assert torch.equal(made[0].tokens[used], made[1].tokens[used])
        torch.testing.assert_close(made[0].logprobs[used], made[1].logprobs[used])
        if slot == 17:
            for decoder in (plain, narrow):
                decoder.free(17)
    assert shapes == [1, 4, 16, 20, 16]
