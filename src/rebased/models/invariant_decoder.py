"""A decoder whose sequences have the same bits whatever else is in the batch: every step has one shape.

Kernels are chosen by shapes, so slots are held in blocks of one size, each a Decoder of its own. A block that nobody
uses is not computed. A cache that grows is read up to the longest sequence of its block: there each slot is a block.
Prompts are read one by one, in chunks that begin at multiples of GRID.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rebased.mixers import init_slots
from rebased.models.decoder import FIRST_CAPACITY, Decoder
from rebased.models.network import LMState, Network
from rebased.models.sampling import Sampling
from rebased.models.step_graph import Stepped
from rebased.ops.invariance import GRID, ask_for_equal_products

CPU_BLOCK = 32
"""Slots: a step of 1 slot becomes one of 32, a step of 64 becomes two of 32. On a CPU torch computes the last numbers
of a tensor by other code than those before, if their count is no multiple of 32 (two AVX-512 registers): softplus and
SiLU then differ in the last bit."""
ACCELERATOR_BLOCK = 64  # a step of 64 slots takes little longer than one of 1


class InvariantDecoder:
    """A Decoder in which a sequence has the same bits alone and among others, in any slot.

    Arguments and methods are those of Decoder. Prompts are not read together, and a prompt is continued from a multiple
    of GRID tokens only.
    """

    fusion = "none"
    prefill_chunk = GRID

    def __init__(self, model: Network, slots: int, *, capacity: int = FIRST_CAPACITY, grows: bool = True) -> None:
        model.init_state(1)  # an error that names a mixer without states
        self.model, self.slots = model, slots
        self.has_caches = any(init_slots(block.mixer, 1, 1).grows for block in model.blocks)
        on_cpu = model.embedding.weight.device.type == "cpu"
        if on_cpu:
            ask_for_equal_products()
        self._size = 1 if self.has_caches else CPU_BLOCK if on_cpu else ACCELERATOR_BLOCK
        self._blocks = [
            _Block(model, self._size, capacity=capacity, grows=grows) for _ in range(max(1, -(-slots // self._size)))
        ]

    @property
    def tokens(self) -> Tensor:
        """[S] int64: what the next step reads."""
        return torch.cat([block.tokens for block in self._blocks])[: self.slots]

    @property
    def logits(self) -> Tensor:
        """[S,vocab] of the last step."""
        return torch.cat([block.logits for block in self._blocks])[: self.slots]

    @property
    def state_bytes(self) -> int:
        """Bytes of all states and caches."""
        return sum(block.state_bytes for block in self._blocks)

    def sizes(self) -> list[int]:
        """Return the numbers of slots whose steps differ in their kernels: here there is one."""
        return [1]

    def capture_steps(self, *, required: bool = True) -> None:
        """Replay steps as CUDA graphs from now on, unless a cache grows: each slot would need graphs of its own."""
        for block in self._blocks if not self.has_caches else ():
            block.capture_steps(required=required)

    def prefill(self, tokens: Sequence[int], state: LMState | None = None) -> LMState:
        """Return the state of one sequence after these tokens, which follow those that `state` has read."""
        return self._blocks[0].prefill(tokens, state)

    def put(self, slot: int, tokens: Sequence[int], state: LMState, sampling: Sampling, **options: Any) -> None:
        """Let a slot hold a sequence: all its tokens so far, and the state after all of them but the last."""
        block, row = self._at(slot)
        block.put(row, tokens, state, sampling, **options)

    def length(self, slot: int) -> int:
        """Return how many tokens the state in a slot has read."""
        block, row = self._at(slot)
        return block.length(row)

    def get(self, slot: int) -> LMState:
        """Return a copy of the state in a slot."""
        block, row = self._at(slot)
        return block.get(row)

    def free(self, slot: int) -> None:
        """Say that nobody uses a slot any more."""
        block, row = self._at(slot)
        block.free(row)

    def step(self) -> Stepped:
        """Read the last token of every active slot and choose the next one, which becomes its last token."""
        made = [block.step() for block in self._blocks]
        tokens, logprobs = (torch.cat(each)[: self.slots] for each in zip(*made, strict=True))
        return Stepped(tokens, logprobs)

    def _at(self, slot: int) -> tuple["_Block", int]:
        return self._blocks[slot // self._size], slot % self._size


class _Block(Decoder):
    """Slots that are stepped together. Each chooses its token independently of the others."""

    greedy_by_kernel = True

    prefill_chunk = GRID

    def prefill(self, tokens: Sequence[int], state: LMState | None = None) -> LMState:
        if state is not None and state.position % GRID:
            raise ValueError(
                f"a state after {state.position} tokens cannot be continued with batch_invariant, where chunks of a "
                f"prompt begin at multiples of {GRID}: read the prompt from such a multiple on"
            )
        return super().prefill(tokens, state)

    def step(self) -> Stepped:
        if not self._active.any():  # what stands for the result of a step that is not made
            return Stepped(self.tokens, torch.zeros(self.slots, device=self.tokens.device))
        return super().step()
