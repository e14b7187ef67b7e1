"""The language model: a network, and what it writes after prompts."""

from dataclasses import replace
from typing import Any

from rebased.data.tokenizer import Tokenizer
from rebased.models.generation import SLOTS, Generated, Generation, Prompts
from rebased.models.job import GenerateOptions
from rebased.models.network import Network


class LanguageModel(Network):
    """A causal language model: token and position embeddings, n_layers blocks, a norm, a head tied to the embeddings.

    Args:
        config: an LMConfig. `preset(name)` makes those of the paper.
        device, dtype: where and in which dtype weights are made, as in torch.nn.Linear.

    Methods, with tokens [B,T] of dtype int64 or int32, T at most config.length_limit:
        forward(tokens): all logits [B,T,vocab].
        hidden(tokens): features [B,T,D] before the head; logits(hidden) applies the head to those you need.
        loss(tokens, labels): mean cross-entropy over the labelled positions. The label of a position stands at the
            position itself: the model does not shift labels. IGNORE (-100) marks positions without a label.
        init_state(batch), extend(tokens, state): prefill and decoding with a state.
        generate(prompts), stream(prompts): what the model writes after prompts, at once or token by token.
        state_size(seq_len), num_parameters(): counts.

    Set `recompute = True` for gradient checkpointing: the backward pass computes each block again from its input.

    Example:
        >>> model = LanguageModel(preset("rebased", d_model=96, vocab_size=1000))
        >>> tokens = torch.randint(1000, (2, 64))
        >>> model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        >>> hidden, state = model.extend(tokens, model.init_state(batch=2))  # prefill
        >>> next_token = model.logits(hidden[:, -1]).argmax(-1)              # [2]
    """

    def generate(self, prompts: Prompts, options: GenerateOptions | None = None, **settings: Any) -> Generated:
        """Return what the model writes after each prompt: Generated(tokens, logprobs, finish_reasons, texts).

        The model must be in eval mode. Arguments as in `stream`.
        """
        return self.stream(prompts, options, **settings).run()

    def stream(
        self,
        prompts: Prompts,
        options: GenerateOptions | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        slots: int = SLOTS,
        batch_invariant: bool = False,
        **changes: Any,
    ) -> Generation:
        """Return an iterator over the tokens that the model writes after each prompt, as they are made.

        Args:
            prompts: token ids of one prompt, or of several of any lengths; texts if there is a tokenizer. An empty
                prompt begins with the end-of-text token.
            options: how tokens are chosen, how many, and when a sequence ends.
            tokenizer: turns prompts into tokens and tokens into text.
            slots: how many sequences are decoded at once; the others wait.
            batch_invariant: whether tokens and log-probabilities of a sequence have the same bits whatever other
                sequences there are. It is slower (docs/batch_invariance.md).
            changes: fields of GenerateOptions, in place of those of `options`: max_tokens, temperature, top_k, top_p,
                min_p, repetition_penalty, seed, n, stop, end_of_text, ignore_end_of_text.

        Example:
            >>> for token in model.stream("def main(", tokenizer=ByteTokenizer(), max_tokens=100):
            ...     print(token.text, end="", flush=True)
        """
        asked = replace(options or GenerateOptions(), **changes)
        return Generation(self, prompts, asked, tokenizer=tokenizer, slots=slots, batch_invariant=batch_invariant)
