"""Writes a random Llama of about 4M weights, its tokenizer and chat template to the folder named.

The engine's own Python runs this script: transformers and tokenizers come with the engine.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch  # type: ignore[import-not-found]
from tokenizers import (  # type: ignore[import-not-found]
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)
from transformers import (  # type: ignore[import-not-found]
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCABULARY = 2048
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def invented_text() -> Iterator[str]:
    """Sentences of made-up words, enough for the tokenizer to learn a full vocabulary."""
    syllables = [first + vowel for first in "bcdfghjklmnprstvwz" for vowel in "aeiou"]
    words = [
        one + two + three for one in syllables for two in syllables for three in ("", "n", "r")
    ]
    for start in range(0, len(words), 8):
        yield " ".join(words[start : start + 8]) + "."


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, so that any text has tokens and comes back unchanged."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(invented_text(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        model_max_length=2048,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def model(vocabulary: int, *, begin: int, end: int) -> LlamaForCausalLM:
    """Random weights from a fixed seed: the text is meaningless, the protocol is real."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=begin,
        eos_token_id=end,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def main(folder: Path) -> None:
    """Write the model and its tokenizer to `folder`."""
    words = tokenizer()
    model(len(words), begin=words.bos_token_id, end=words.eos_token_id).save_pretrained(folder)
    words.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
