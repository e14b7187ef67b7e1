"""LanguageModel for Hugging Face transformers: config, model and cache, registered with the Auto classes on import.

A thin shell: weights and computation are LanguageModel's, and what transformers asks of a model is in
modeling_rebased.py. Rows of a padded batch are computed as if they were alone, so padding changes nothing, whatever the
mixers are. The cache holds one slot per row (mixers/slots.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

try:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    from rebased.models import modeling_rebased as flat
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"models for Hugging Face need {error.name}: pip install 'rebased[hf]'", name=error.name
    ) from error

from rebased.data.tokenizer import Tokenizer
from rebased.mixers import init_slots
from rebased.mixers.slots import split_rows, tensors_of
from rebased.models.config import LMConfig
from rebased.models.language_model import LanguageModel
from rebased.models.network import LMState
from rebased.ops import linear_cross_entropy

TO_LOAD = (
    "in a clone of rebased: pip install '.[hf]'; then `import {}` before AutoModelForCausalLM.from_pretrained; "
    "README.md has the code"
)


class RebasedConfig(flat.RebasedConfig):
    """The config of a RebasedForCausalLM: an LMConfig as the dict `model`, and what transformers adds.

    Args:
        model: the fields of LMConfig. Default: LMConfig's defaults.

    `vocab_size`, `hidden_size`, `num_hidden_layers` and `max_position_embeddings` are read from it, because other tools
    ask for them; max_position_embeddings is None for a model without learned positions.
    """

    def __init__(self, model: dict[str, Any] | None = None, **kwargs: Any) -> None:
        config = LMConfig.model_validate(model or {})
        kwargs |= {
            "vocab_size": config.vocab_size,
            "hidden_size": config.d_model,
            "num_hidden_layers": config.n_layers,
            "max_position_embeddings": config.length_limit,
            "to_load": TO_LOAD.format(
                ", ".join([*config.own_modules(), __name__])
            ),  # for those who read config.json because transformers does not know the model
        }
        super().__init__(config.model_dump(mode="json"), **kwargs)

    @property
    def language_model(self) -> LMConfig:
        """The LMConfig."""
        return LMConfig.model_validate(self.model)


Span = tuple[int, int]


def find_spans(keep: Tensor | None, batch: int, length: int) -> list[Span]:
    """Where the tokens of each row of a batch [B,T] begin and end, by `keep` [B,T]. None: everywhere."""
    if keep is None:
        return [(0, length)] * batch
    begins = keep.int().argmax(1)
    return list(zip(begins.tolist(), (begins + keep.sum(1)).tolist(), strict=True))


class RebasedCache(flat.RebasedCache):
    """The state of each row of a batch: one slot per row. Rows may have read different numbers of tokens."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.lengths: list[int] = []  # tokens that each row has read
        self._slots: list[Any] = []

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for slots in self._slots for tensor in slots.tensors())

    def read_states(self) -> list[LMState]:
        """Copies of the rows' states."""
        return [
            LMState(length, tuple(slots.get(row, length) for slots in self._slots))
            for row, length in enumerate(self.lengths)
        ]

    def write_states(self, states: Sequence[LMState]) -> None:
        """Replace all rows by these."""
        self.lengths = [state.position for state in states]
        self._capacity = 2 * max([*self.lengths, 64])
        self._slots = [init_slots(block.mixer, len(states), self._capacity) for block in self._model.blocks]
        for row, state in enumerate(states):
            for slots, layer in zip(self._slots, state.layers, strict=True):
                slots.put(row, layer, state.position)

    def step(self, tokens: Tensor) -> Tensor:
        """Features [B,1,D] of one more token [B] per row."""
        longest = max(self.lengths) + 1
        self._model.check_positions(longest)
        if longest > self._capacity:
            self._capacity *= 2
            for slots in self._slots:
                slots.reserve(self._capacity)
        lengths = torch.tensor(self.lengths, device=tokens.device)
        hidden = self._model.step(tokens, self._slots, lengths, longest)
        self.lengths = [length + 1 for length in self.lengths]
        self.columns += 1
        return hidden.unsqueeze(1)

    def batch_select_indices(self, indices: Tensor) -> None:
        states = self.read_states()
        self.write_states([states[row] for row in indices.tolist()])


class RebasedForCausalLM(flat.RebasedForCausalLM):
    """A LanguageModel as transformers knows models: from_pretrained, save_pretrained, generate, Trainer, pipelines.

    `model` is the LanguageModel itself.
    """

    config_class = RebasedConfig
    cache_class = RebasedCache
    supports_gradient_checkpointing = True

    @classmethod
    def from_language_model(cls, model: LanguageModel) -> "RebasedForCausalLM":
        """A shell around this model, which is not copied."""
        shell = cls(RebasedConfig(model.config.model_dump(mode="json")))
        shell.model = model
        return shell.train(model.training)

    def _build(self, config: RebasedConfig) -> LanguageModel:
        model = LanguageModel(config.language_model)
        self._tied_weights_keys = _shared_parameters(model)
        return model

    def _set_gradient_checkpointing(self, enable: bool = True, **_: Any) -> None:
        self.model.recompute = enable

    def _new_cache(self) -> RebasedCache:
        return RebasedCache(self.model)

    def _sum_of_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, self.model.embedding.weight, targets)

    def _hidden(self, tokens: Tensor, keep: Tensor | None, cache: Any) -> Tensor:
        """Features [B,T,D] of tokens [B,T] that follow those in the cache, which reads them.

        Without a cache, rows that begin with padding are shifted to the first column and back: as they do not look
        ahead, padding at the end changes nothing.
        """
        spans = find_spans(keep, *tokens.shape)
        if cache is not None:
            return self._read(tokens, spans, cache)
        if not any(begin for begin, _ in spans):
            return self.model.hidden(tokens)
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        begins = torch.tensor([[begin] for begin, _ in spans], device=tokens.device)
        there, back = (columns + begins) % len(columns), (columns - begins) % len(columns)  # [B,T]
        hidden = self.model.hidden(tokens.gather(1, there))
        return hidden.gather(1, back.unsqueeze(2).expand_as(hidden))

    def _read(self, tokens: Tensor, spans: list[Span], cache: RebasedCache) -> Tensor:
        """Features [B,T,D] of tokens [B,T] that follow those in the cache, which reads them. Padding gets zeros."""
        B, T = tokens.shape
        if cache.columns and set(spans) == {(0, 1)} and T == 1:
            return cache.step(tokens[:, 0])
        before = cache.read_states() if cache.columns else [self.model.init_state(1)] * B
        hidden = torch.zeros(B, T, self.model.config.d_model, dtype=self.dtype, device=tokens.device)
        after: dict[int, LMState] = {}
        for group in self._groups(spans, before):
            first, n = group[0], len(group)
            begin, end = spans[first]
            state = before[first] if n == 1 else self.model.init_state(n)
            features, state = self.model.extend(tokens[group, begin:end], state)
            hidden[group, begin:end] = features.to(hidden.dtype)
            layers = [split_rows(layer, n) if n > 1 else [layer] for layer in state.layers]
            after |= {row: LMState(state.position, tuple(each[i] for each in layers)) for i, row in enumerate(group)}
        cache.write_states([after[row] for row in range(B)])
        cache.columns += T
        return hidden

    def _groups(self, spans: list[Span], before: Sequence[LMState]) -> list[list[int]]:
        """Rows that are computed together: those in the same columns that have read nothing yet, if states of several
        rows can be taken apart. The others are computed one by one."""
        apart = all(tensor.shape[:1] == (2,) for tensor in tensors_of(self.model.init_state(2).layers))
        groups: dict[Any, list[int]] = {}
        for row, (span, state) in enumerate(zip(spans, before, strict=True)):
            groups.setdefault(span if apart and state.position == 0 else row, []).append(row)
        return list(groups.values())


def to_hf_tokenizer(tokenizer: Tokenizer, max_length: int | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of ours as transformers knows them. It pads on the left, with the token that ends texts.

    `max_length`: the model's positions, if it has a limit.
    """
    content = tokenizer.to_json()
    inner = _byte_level() if content is None else Inner.from_buffer(content)
    end = None if tokenizer.end_of_text is None else inner.id_to_token(tokenizer.end_of_text)
    limit = {} if max_length is None else {"model_max_length": max_length}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=end, bos_token=end, pad_token=end, padding_side="left", **limit
    )


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Inside, transformers shows no progress bars, such as that of the shards that it writes."""
    were_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            logging.enable_progress_bar()


def _byte_level() -> Inner:
    """One token per byte, and 256 for the end of a text: the tokenizer that needs no file."""
    # The library writes a printable byte as the character of its number, and the others as 256, 257, ...
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    inner = Inner(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>"])
    return inner


def _shared_parameters(model: LanguageModel) -> dict[str, str]:
    """Names (in the shell) of parameters that are another one under a second name, with that one's name."""
    first: dict[int, str] = {}
    shared = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            shared[f"model.{name}"] = f"model.{first[id(parameter)]}"
    return shared


AutoConfig.register(RebasedConfig.model_type, RebasedConfig)
AutoModelForCausalLM.register(RebasedConfig, RebasedForCausalLM)
