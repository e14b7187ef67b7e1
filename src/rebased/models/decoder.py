"""The decoder: a model with slots, each of which holds one sequence; a step makes the next token of all of them.

It is the core under `generate`, and under a server: a sequence takes a slot when it comes and leaves it when it ends,
prompts are read in chunks between steps, and states of common prefixes are kept as values and put where they are
needed. What a step reads and writes stays where it is, and it never waits for the device: step_graph.py replays it.
"""

import copy
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rebased.mixers import init_slots
from rebased.mixers.slots import FixedSlots
from rebased.models.fused_step import can_fuse, fused_step_, fuses_by_default
from rebased.models.network import LMState, Network
from rebased.models.sampling import Mode, Sampling, SamplingSlots, SlotSampling
from rebased.models.step_graph import StepGraphs, Stepped
from rebased.ops import advance_slots_, best_tokens
from rebased.ops.backend import to_device

Fusion = Literal["auto", "none", "kernels", "compile"]
"""How the operations of a step are joined: "none": as the model is written. "kernels": by our kernels
(models/fused_step.py). "compile": by torch.compile. "auto": "kernels" on a GPU where they fit, else "none"."""

PREFILL_CHUNK = 4096  # tokens of prompts that are read at once, on a CPU
LONGEST_CHUNK = 32_768  # the same on a GPU, where launching the kernels of a chunk takes long; less in a wide model:
CHUNK_BYTES = 2**29  # of the widest features of a chunk, those inside an MLP
NARROW = (1, 4, 16, 64, 96, 128, 160, 192, 224, 256, 384, 512, 1024)  # slots: few sizes, because each is a graph
FIRST_CAPACITY = 1024  # tokens that a cache has room for, where nobody says how many there will be


class Decoder:
    """Slots for `slots` sequences of a model, and the step that decodes one token of each.

    Args:
        model: a LanguageModel in eval mode, whose mixers have states. Its weights must not change while it is used.
        slots: how many sequences are decoded at once, S. Memory is taken for all of them now.
        capacity: tokens per sequence for which caches have room, where mixers have caches that grow: softmax attention
            and Hyena. Default 1,024. ReBased, Based and other mixers of constant state need none.
        grows: whether a full cache is replaced by one twice as large (default). Otherwise it is an error.
        capture: whether steps are replayed as CUDA graphs (models/step_graph.py), on a GPU. Default False.
        fusion: how operations of a step are joined (Fusion). Default "auto".
        narrow: whether a step computes the first slots alone, up to the last one in use, and returns those. Their
            number is one of NARROW, or all. Default False.

    A slot holds the state after all tokens of its sequence but the last, and that token, which the next step reads.

    Attributes, all on the device of the model: `tokens` [S] int64, which the next step reads; `lengths` [S] int64, how
    many tokens each state has read; `active` [S] bool, as the last step knew it; `logits` [S,vocab] of the last step;
    `sampling`.

    Example:
        >>> decoder = Decoder(model, slots=2)
        >>> for slot, prompt in enumerate(([1, 2, 3], [4])):
        ...     decoder.put(slot, prompt, decoder.prefill(prompt[:-1]), Sampling(temperature=0.0))
        >>> tokens, logprobs = decoder.step()                                   # [2] each
    """

    greedy_by_kernel = False  # whether fused steps choose greedy tokens by their kernel beside slots that draw, too

    @torch.inference_mode(False)  # its tensors are written to later, whatever the mode is then
    def __init__(
        self,
        model: Network,
        slots: int,
        *,
        capacity: int = FIRST_CAPACITY,
        grows: bool = True,
        capture: bool = False,
        fusion: Fusion = "auto",
        narrow: bool = False,
    ) -> None:
        if model.training:
            raise ValueError("the model is in training mode, where dropout is random; call model.eval() first")
        if slots < 1 or capacity < 1:
            raise ValueError(f"{slots} slots of {capacity} tokens hold nothing; give at least 1 of each")
        self.model, self.slots = model, slots
        if fusion == "kernels" and not can_fuse(model):
            raise ValueError(
                "the kernels of a step take bf16, fp16 or fp32, one dtype for all weights, and the model's own blocks; "
                "convert the model, or leave out fusion"
            )
        self.fusion: Fusion = ("kernels" if fuses_by_default(model) else "none") if fusion == "auto" else fusion
        self._read: Any = torch.compile(self._plain_logits, dynamic=False) if fusion == "compile" else None
        device = model.embedding.weight.device
        self._length_limit = model.config.length_limit
        self.capacity, self.grows = min(capacity, self._length_limit or sys.maxsize), grows
        model.init_state(1)  # an error that names a mixer without states
        self.layers = [init_slots(block.mixer, slots, self.capacity) for block in model.blocks]
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        self.active = torch.zeros(slots, dtype=torch.bool, device=device)
        self.logits = torch.zeros(slots, model.config.vocab_size, device=device, dtype=model.embedding.weight.dtype)
        self.sampling = SamplingSlots(slots, model.config.vocab_size, device)
        self._graphs: StepGraphs | None = None
        if capture:
            self.capture_steps()
        self._lengths = np.zeros(slots, dtype=np.int64)  # what `lengths` will say at the next step, on the host
        self._active = np.zeros(slots, dtype=bool)  # the same of `active`
        self._changed = False  # whether `active` is to be written
        self._later: dict[int, tuple[LMState, SlotSampling]] = {}  # what the next step puts into slots
        self.narrows = narrow and fusion != "compile" and all(hasattr(layer, "first") for layer in self.layers)
        self._parts: dict[int, Decoder] = {}  # the first slots, by their number

    def capture_steps(self, *, required: bool = True) -> None:
        """Replay steps as CUDA graphs from now on, as `capture` does; if not `required`, only where it is possible."""
        self._graphs = StepGraphs(self.compute, self.tokens.device, required=required)

    def prefill(self, tokens: Sequence[int], state: LMState | None = None) -> LMState:
        """Return the state of one sequence after these tokens, which follow those that `state` has read."""
        state = self.model.init_state(1) if state is None else state
        for after in self.prefill_chunks(tokens, state):
            state = after
        return state

    @torch.no_grad()
    def prefill_chunks(
        self, tokens: Sequence[int], state: LMState | None = None, chunk: int | None = None
    ) -> Iterator[LMState]:
        """Yield the state after each chunk of the tokens (default `prefill_chunk`), so that steps can be made between.

        States are values: none is changed later, each can be kept and continued several times.
        """
        state = self.model.init_state(1) if state is None else state
        ids = to_device([tokens], torch.int64, self.tokens.device)
        for tokens_of_chunk in ids.split(chunk or self.prefill_chunk, dim=1) if len(tokens) else ():
            _, state = self.model.extend(tokens_of_chunk, state)
            yield state

    def put(
        self,
        slot: int,
        tokens: Sequence[int],
        state: LMState,
        sampling: Sampling,
        *,
        sequence: int = 0,
        later: bool = False,
    ) -> None:
        """Let a slot hold a sequence: all its tokens so far (at least 1), and the state after all of them but the last.

        `sequence` numbers the sequences of a seed: each has its own random stream. With `later` the next step writes
        it, together with all others since the last one: many take little longer than one.
        """
        if state.position != len(tokens) - 1:
            raise ValueError(
                f"the state has read {state.position} tokens; a sequence of {len(tokens)} needs one that has read all "
                f"but the last, {len(tokens) - 1}"
            )
        chosen = SlotSampling(sampling, tokens, sequence)
        self._reserve(len(tokens))
        self._later[slot] = (state, chosen)
        self._lengths[slot], self._active[slot], self._changed = state.position, True, True
        if not later:
            self._write()

    @torch.no_grad()
    def _write(self) -> None:
        """Write what was put into slots, or freed, since the last step."""
        later, self._later = self._later, {}
        slots, device = list(later), self.tokens.device
        if slots:
            index = to_device(slots, torch.int64, device)
            for number, layer in enumerate(self.layers):
                if isinstance(layer, FixedSlots) and len(slots) > 1:
                    layer.put_all(index, [state.layers[number] for state, _ in later.values()])
                else:
                    for slot, (state, _) in later.items():
                        layer.put(slot, state.layers[number], state.position)
            self.sampling.put(slots, [sampling for _, sampling in later.values()])
            numbers = [(sampling.tokens[-1], state.position) for state, sampling in later.values()]
            tokens, lengths = to_device(numbers, torch.int64, device).unbind(1)
            self.tokens.index_copy_(0, index, tokens)
            self.lengths.index_copy_(0, index, lengths)
        if self._changed:
            self.active.copy_(to_device(self._active, torch.bool, device))
            self._changed = False

    def length(self, slot: int) -> int:
        """Return how many tokens the state in a slot has read."""
        return int(self._lengths[slot])

    def get(self, slot: int) -> LMState:
        """Return a copy of the state in a slot: that after all tokens of its sequence but the last."""
        self._write()
        length = self.length(slot)
        return LMState(length, tuple(layer.get(slot, length) for layer in self.layers))

    def free(self, slot: int) -> None:
        """Say that nobody uses a slot any more. What steps compute for it then counts for nothing."""
        self._later.pop(slot, None)
        self._active[slot], self._changed = False, True
        self.sampling.clear(slot)

    def step(self) -> Stepped:
        """Read the last token of every active slot and choose the next one, which becomes its last token."""
        longest = self._advance()
        self._write()
        if self._graphs is not None or self.fusion == "compile":
            if self.has_caches:  # four graphs per power of two, not one per token
                step = max(1, 1 << (longest - 1).bit_length() >> 3)
                longest = min(self.capacity, -(-longest // step) * step)
            else:
                longest = self.capacity
        run = self.compute if self._graphs is None else self._graphs.run
        return run(longest, self.sampling.mode, self._rows())

    def sizes(self) -> list[int]:
        """Return the numbers of slots that steps may compute."""
        return [*(size for size in NARROW if size < self.slots and self.narrows), self.slots]

    def _rows(self) -> int:
        """Return how many slots the next step computes."""
        used = self._active.nonzero()[0]
        return next(size for size in self.sizes() if size > (used[-1] if len(used) else 0))

    def _part(self, rows: int) -> "Decoder":
        """Return a decoder of the first slots, which shares its memory with this one."""
        if rows not in self._parts:
            part = self._parts[rows] = copy.copy(self)
            part.slots, part.sampling = rows, self.sampling.part(0, rows)
            layers: list[Any] = self.layers
            part.layers = [layer.first(rows) for layer in layers]
            for name in ("tokens", "lengths", "active", "logits"):
                setattr(part, name, getattr(self, name)[:rows])
        return self._parts[rows]

    def _advance(self) -> int:
        """Count a token for every active slot. Returns how many tokens of a cache must be read at most."""
        longest = 1 + int(self._lengths.max(where=self._active, initial=0))
        limit = self._length_limit
        if limit is not None and longest > limit:
            raise ValueError(f"a slot has read all {limit} positions of the model; free it before the next step")
        self._reserve(longest)
        self._lengths += self._active
        return min(longest, self.capacity)

    @torch.no_grad()
    def compute(self, longest: int, mode: Mode, rows: int) -> Stepped:
        """The part of `step` that runs on the device: reads and writes only tensors that stay where they are.

        `longest` is how many tokens of a cache are read, `mode` what choosing needs at most (SamplingSlots.mode), and
        `rows` how many slots are computed.
        """
        if rows < self.slots:
            return self._part(rows).compute(longest, mode, rows)
        if self.fusion == "kernels" and not torch.is_autocast_enabled(self.tokens.device.type):
            return self._compute_fused(longest, mode)
        self.logits.copy_((self._read or self._plain_logits)(longest))
        scores = self.logits if self.logits.dtype == torch.float64 else self.logits.float()
        chosen = self.sampling.choose(scores, mode)
        logprobs = scores.gather(1, chosen.unsqueeze(1)).squeeze(1) - scores.logsumexp(-1)
        self.tokens.copy_(torch.where(self.active, chosen, self.tokens))
        self.sampling.advance(chosen, self.active)
        self.lengths.add_(self.active)
        return Stepped(chosen, logprobs)

    def _plain_logits(self, longest: int) -> Tensor:
        lengths = self.lengths.clamp(max=longest - 1)  # of slots that nobody uses: any place inside will do
        return self.model.logits(self.model.step(self.tokens, self.layers, lengths, longest))

    def _compute_fused(self, longest: int, mode: Mode) -> Stepped:
        """Like `compute`, with everything around the mixers in fused kernels."""
        sampling, lengths = self.sampling, self.lengths
        if self.has_caches:
            lengths = lengths.clamp(max=longest - 1)
        fused_step_(self.model, self.tokens, self.layers, lengths, longest, self.logits)
        chosen, log_sums = best_tokens(self.logits, sampling.seen, sampling.penalty)
        if mode != "greedy":
            drawn = sampling.choose(self.logits, mode)
            chosen = torch.where(sampling.temperature == 0, chosen, drawn) if self.greedy_by_kernel else drawn
        logprobs = advance_slots_(
            chosen, self.logits, log_sums, self.active, self.tokens, self.lengths, sampling.drawn, sampling.seen
        )
        return Stepped(chosen, logprobs)

    @torch.inference_mode(False)
    def _reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens."""
        if length <= self.capacity:
            return
        if not self.grows:
            raise ValueError(
                f"a sequence of {length} tokens does not fit into a capacity of {self.capacity}; make the decoder with "
                f"capacity={length}"
            )
        self.capacity = min(max(2 * self.capacity, length), self._length_limit or sys.maxsize)
        self._parts.clear()
        for layer in self.layers:
            layer.reserve(self.capacity)
        if self._graphs is not None and self.has_caches:
            self._graphs.clear()  # they write to where the caches were

    @property
    def has_caches(self) -> bool:
        """Whether a state grows with its sequence, as the cache of softmax attention does."""
        return any(layer.grows for layer in self.layers)

    @property
    def prefill_chunk(self) -> int:
        """How many tokens of prompts are read at once: a function of the model and the kind of its device alone.

        A chunk stays short where it takes memory for all pairs of its tokens and those before, as some caches do.
        """
        config, weight = self.model.config, self.model.embedding.weight
        reads_long = all(not layer.grows or getattr(layer, "reads_long", False) for layer in self.layers)
        if weight.device.type == "cpu" or not reads_long:
            return PREFILL_CHUNK
        widest = max(4, config.mlp_ratio) * config.d_model * weight.element_size()
        return max(PREFILL_CHUNK, min(LONGEST_CHUNK, CHUNK_BYTES // widest))

    @property
    def state_bytes(self) -> int:
        """Bytes of all states and caches."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors())
