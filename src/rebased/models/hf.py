"""LanguageModel for Hugging Face transformers: config, model and cache, registered with the Auto classes on import.

A thin shell: weights and computation are LanguageModel's. Rows of a padded batch are computed as if they were alone, so
padding changes nothing, whatever the mixers are. The cache holds one slot per row (mixers/slots.py).

A saved folder has the checksums of its weights, and a folder is loaded only if they match.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

try:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        Cache,
        GenerationMixin,
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
    )
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.utils import logging
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"models for Hugging Face need {error.name}: pip install 'rebased[hf]'", name=error.name
    ) from error

from rebased.data.tokenizer import Tokenizer
from rebased.files import read_json, replacing, sha256_file
from rebased.mixers import init_slots
from rebased.mixers.slots import map_tensors, tensors_of
from rebased.models.config import LMConfig
from rebased.models.language_model import LanguageModel
from rebased.models.network import LMState
from rebased.ops import IGNORE, linear_cross_entropy

NO_LIMIT = -1  # transformers' word for a cache without a longest sequence
CHECKSUMS = "checksums.json"
TO_LOAD = "pip install 'rebased[hf]', then `import rebased.models.hf` before AutoModelForCausalLM.from_pretrained"
LACKING = ("inputs_embeds", "output_hidden_states", "output_attentions")  # arguments of other models


class RebasedConfig(PretrainedConfig):
    """The config of a RebasedForCausalLM: an LMConfig as the dict `model`, and what transformers adds.

    Args:
        model: the fields of LMConfig. Default: LMConfig's defaults.

    `vocab_size`, `hidden_size`, `num_hidden_layers` and `max_position_embeddings` are read from it, because other tools
    ask for them; max_position_embeddings is None for a model without learned positions.
    """

    model_type = "rebased"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(self, model: dict[str, Any] | None = None, **kwargs: Any) -> None:
        config = LMConfig.model_validate(model or {})
        self.model = config.model_dump(mode="json")
        for name, value in _standard_names(config).items():
            kwargs.pop(name, None)
            setattr(self, name, value)
        kwargs["to_load"] = TO_LOAD  # for those who read config.json because transformers does not know the model
        kwargs.setdefault("tie_word_embeddings", True)  # some versions tie no weights at all without it
        super().__init__(**kwargs)

    @property
    def language_model(self) -> LMConfig:
        """The LMConfig."""
        return LMConfig.model_validate(self.model)


def _standard_names(config: LMConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "max_position_embeddings": config.length_limit,
    }


class Rows(NamedTuple):
    """Where the tokens of each row stand in a padded batch [B,T]: columns begin to end."""

    begins: list[int]
    ends: list[int]


def find_rows(mask: Tensor | None, batch: int, length: int) -> Rows:
    """The tokens of each row of a batch [B,T] by its attention mask, which is 1 where they are. None: everywhere.

    Raises ValueError if a row has none, or gaps between them: padding stands at the beginning or at the end.
    """
    if mask is None:
        return Rows([0] * batch, [length] * batch)
    if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] < length:
        raise ValueError(
            f"attention_mask is {list(mask.shape)}; it must be [{batch}, {length}], 1 for tokens, 0 for padding"
        )
    here = mask[:, mask.shape[1] - length :].bool().cpu()
    counts = here.sum(1)
    begins = torch.where(counts > 0, here.int().argmax(1), 0)
    ends = begins + counts
    columns = torch.arange(length)
    if not torch.equal(here, (columns >= begins.unsqueeze(1)) & (columns < ends.unsqueeze(1))):
        raise ValueError("attention_mask has gaps between the tokens of a row; pad at the beginning or at the end only")
    if (counts == 0).any():
        raise ValueError(
            f"row {int((counts == 0).nonzero()[0])} of attention_mask has no tokens; give each row at least one"
        )
    return Rows(begins.tolist(), ends.tolist())


class RebasedCache(Cache):
    """The state of each row of a batch: one slot per row. Rows may have read different numbers of tokens.

    `get_seq_length` counts columns of the batch, padding included, because `generate` cuts its input there.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(layers=[])
        self._model = model
        self._slots: list[Any] = []
        self.lengths: list[int] = []  # tokens that each row has read
        self.columns = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch that were read, padding included."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: the cache grows if it has to."""
        return NO_LIMIT

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """The name of `get_max_length` in some versions of transformers."""
        return NO_LIMIT

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(columns after a query of this length, 0)."""
        return self.columns + int(query_length), 0

    @property
    def is_compileable(self) -> bool:
        """False: lengths of rows are kept on the host."""
        return False

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
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
        capacity = 2 * max([*self.lengths, 64])
        self._slots = [init_slots(block.mixer, len(states), capacity) for block in self._model.blocks]
        self._capacity = capacity
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

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i be what row beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        states = self.read_states()
        self.write_states([states[row] for row in indices.tolist()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.write_states([state for state in self.read_states() for _ in range(repeats)])

    def reset(self) -> None:
        """Forget everything."""
        self._slots, self.lengths, self.columns = [], [], 0

    def crop(self, *_: Any, **__: Any) -> None:
        """Raise: a state of constant size cannot forget its last tokens."""
        raise NotImplementedError("the state of a linear mixer cannot be cropped: assisted generation is not possible")


class RebasedForCausalLM(PreTrainedModel, GenerationMixin):
    """A LanguageModel as transformers knows models: from_pretrained, save_pretrained, generate, Trainer, pipelines.

    `model` is the LanguageModel itself.
    """

    config_class = RebasedConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True  # a state cannot be rolled back
    _supports_cache_class = True

    def __init__(self, config: RebasedConfig) -> None:
        super().__init__(config)
        self.model = LanguageModel(config.language_model)
        self._tied_weights_keys = _shared_parameters(self)
        self.post_init()

    @classmethod
    def from_language_model(cls, model: LanguageModel) -> "RebasedForCausalLM":
        """A shell around this model, which is not copied."""
        shell = cls(RebasedConfig(model.config.model_dump(mode="json")))
        shell.model = model
        return shell.train(model.training)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As of every PreTrainedModel; then writes the checksums of the weights to checksums.json."""
        super().save_pretrained(save_directory, *args, **kwargs)
        folder = Path(save_directory)
        found = {path.name: sha256_file(path) for path in sorted(folder.glob("*.safetensors"))}
        with replacing(folder / CHECKSUMS) as file:
            file.write(json.dumps(found, indent=1).encode())

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As of every PreTrainedModel. The weights of a folder must have the checksums that were saved with them.

        Raises ValueError if they do not. A folder without checksums.json is loaded with a warning.
        """
        folder = Path(str(pretrained_model_name_or_path)) / kwargs.get("subfolder", "")
        if folder.is_dir():
            _check_weights(folder)
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` makes the cache

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: LanguageModel has drawn its weights when it was made."""

    def _set_gradient_checkpointing(self, enable: bool = True, **_: Any) -> None:
        self.model.recompute = enable

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, which is the head too."""
        return self.model.embedding

    def get_output_embeddings(self) -> None:
        """None: the head is the embedding."""
        return None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RebasedCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits, and a loss where there are labels.

        Args:
            input_ids: tokens [B,T].
            attention_mask: [B,T], or [B,columns so far + T] with a cache: 1 for tokens, 0 for padding.
            past_key_values: a cache that an earlier call returned; the tokens follow those it has read.
            labels: [B,T], the tokens themselves: the model predicts labels[:, t + 1] at t. -100 marks those that do not
                count; so does padding.
            use_cache: whether to return a cache. Default: only if one is given.
            logits_to_keep: compute logits of the last so many positions only; 0: of all. Or the positions.
            num_items_in_batch: what the sum of losses is divided by. Default: the number of labels.
            others: what trainers and tokenizers give other models, such as token_type_ids. It changes nothing.
        """
        lacking = [name for name in LACKING if others.get(name) is not None and others[name] is not False]
        if lacking or input_ids is None:
            given = f"; got {', '.join(lacking)}" if lacking else ""
            raise ValueError(f"this model takes input_ids, and returns logits, a loss and a cache{given}")
        rows = find_rows(attention_mask, *input_ids.shape)
        if use_cache or past_key_values is not None:
            cache = RebasedCache(self.model) if past_key_values is None else past_key_values
            if not isinstance(cache, RebasedCache):
                raise ValueError(f"past_key_values is a {type(cache).__name__}; give one that this model returned")
            hidden = self._read(input_ids, rows, cache)
        else:
            cache, hidden = None, self._hidden(input_ids, rows)
        loss = None if labels is None else self._loss(hidden, labels, attention_mask, num_items_in_batch)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(hidden[:, kept]) if loss is None or not self.training else None
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
        return output if return_dict in (None, True) else output.to_tuple()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: RebasedCache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What `generate` calls `forward` with: the columns that the cache has not read yet."""
        if past_key_values is not None:
            input_ids = input_ids[:, past_key_values.get_seq_length() :]
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
            "use_cache": kwargs.get("use_cache", True),
            "logits_to_keep": kwargs.get("logits_to_keep") or 0,
        }

    def _hidden(self, tokens: Tensor, rows: Rows) -> Tensor:
        """Features [B,T,D]. Rows that begin with padding are shifted to the first column and back: as they do not look
        ahead, padding at the end changes nothing."""
        if not any(rows.begins):
            return self.model.hidden(tokens)
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        begins = torch.tensor(rows.begins, device=tokens.device).unsqueeze(1)
        there, back = (columns + begins) % len(columns), (columns - begins) % len(columns)  # [B,T]
        hidden = self.model.hidden(tokens.gather(1, there))
        return hidden.gather(1, back.unsqueeze(2).expand_as(hidden))

    def _read(self, tokens: Tensor, rows: Rows, cache: RebasedCache) -> Tensor:
        """Features [B,T,D] of tokens [B,T] that follow those in the cache, which reads them. Padding gets zeros."""
        B, T = tokens.shape
        if cache.columns and len(cache.lengths) != B:
            raise ValueError(f"the cache has {len(cache.lengths)} rows and input_ids {B}; they must be the same")
        if cache.columns and T == 1 and not any(rows.begins) and set(rows.ends) == {1}:
            return cache.step(tokens[:, 0])
        before = cache.read_states() if cache.columns else [self.model.init_state(1)] * B
        hidden = torch.zeros(B, T, self.model.config.d_model, dtype=self.dtype, device=tokens.device)
        after: dict[int, LMState] = {}
        for group in self._groups(rows, before):
            begin, end = rows.begins[group[0]], rows.ends[group[0]]
            state = before[group[0]] if len(group) == 1 else self.model.init_state(len(group))
            features, state = self.model.extend(tokens[group, begin:end], state)
            hidden[group, begin:end] = features.to(hidden.dtype)
            after |= {row: _row_of(state, i) for i, row in enumerate(group)} if len(group) > 1 else {group[0]: state}
        cache.write_states([after[row] for row in range(B)])
        cache.columns += T
        return hidden

    def _groups(self, rows: Rows, before: Sequence[LMState]) -> list[list[int]]:
        """Rows that are computed together: those in the same columns that have read nothing yet, if states of several
        rows can be taken apart. The others are computed one by one."""
        apart = all(tensor.shape[:1] == (2,) for tensor in tensors_of(self.model.init_state(2).layers))
        groups: dict[Any, list[int]] = {}
        for row, (begin, end, state) in enumerate(zip(*rows, before, strict=True)):
            groups.setdefault((begin, end) if apart and state.position == 0 else row, []).append(row)
        return list(groups.values())

    def _loss(self, hidden: Tensor, labels: Tensor, mask: Tensor | None, num_items: Tensor | int | None) -> Tensor:
        targets = labels[:, 1:]
        if mask is not None:  # padding is no label, and predicts none
            targets = targets.masked_fill(~(mask[:, 1:] & mask[:, :-1]).bool(), IGNORE)
        asked = targets != IGNORE
        losses = linear_cross_entropy(hidden[:, :-1][asked], self.model.embedding.weight, targets[asked])
        return losses / (asked.sum() if num_items is None else num_items)


def _check_weights(folder: Path) -> None:
    """Raises ValueError if the weights in a folder are not those that were saved."""
    path = folder / CHECKSUMS
    if not path.exists():
        logging.get_logger(__name__).warning(f"{folder} has no {CHECKSUMS}: damaged weights would not be noticed")
        return
    try:
        expected = dict(read_json(path))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for file in sorted({*expected, *(each.name for each in folder.glob("*.safetensors"))}):
        if not (folder / file).is_file() or sha256_file(folder / file) != expected.get(file):
            raise ValueError(
                f"{folder / file} is not what was saved with the model: it is damaged or was replaced. Export the "
                f"model again, or remove {CHECKSUMS} if the weights were changed on purpose"
            )


def _row_of(state: LMState, row: int) -> LMState:
    """The state of one row of a batch."""
    return LMState(state.position, map_tensors(lambda tensor: tensor[row : row + 1], state.layers))


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
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # The library writes a printable byte as the character of its number, and the others as 256, 257, ...
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    assert sorted(vocabulary) == characters
    inner = Inner(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer, inner.decoder = encode, decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>"])
    return inner


def _shared_parameters(model: nn.Module) -> dict[str, str]:
    """Names of parameters that are another one under a second name, with that one's name."""
    first: dict[int, str] = {}
    shared = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            shared[name] = first[id(parameter)]
    return shared


AutoConfig.register(RebasedConfig.model_type, RebasedConfig)
AutoModelForCausalLM.register(RebasedConfig, RebasedForCausalLM)
