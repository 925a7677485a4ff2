"""A tokenizer of single characters whose special ids stand elsewhere than the shipped policy's."""

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from stoa.chat.render import ChatRenderer

SPECIAL = ("<|tool_call_end|>", "<|im_end|>", "<|tool_call_start|>", "<|im_start|>", "<|startoftext|>", "<|pad|>")


def character_tokenizer(special: tuple[str, ...] = SPECIAL) -> Tokenizer:
    pieces = ["?", *(chr(code) for code in range(32, 127) if chr(code) != "?"), "\n", *special]
    tokenizer = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special])
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return character_tokenizer()


@pytest.fixture(scope="session")
def renderer(tokenizer: Tokenizer) -> ChatRenderer:
    return ChatRenderer(tokenizer.to_str().encode())
