"""The tokenizer of the shipped small policy: 256 pieces that spell every world, question and search result.

Only the warm start uses this. A run takes its tokenizer from the checkpoint, whatever it is.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from environments.search import corpus, prompts
from environments.search.index import words_of
from environments.search.questions import WORDINGS
from stoa.contracts.errors import ConfigError

VOCABULARY_SIZE = 256
PAD, UNKNOWN, STOP = "<|pad|>", "<|unk|>", "<|im_end|>"
SPECIAL = (PAD, "<|startoftext|>", "<|im_start|>", STOP, "<|tool_call_start|>", "<|tool_call_end|>", UNKNOWN)
# A call in two pieces, so that a turn stays short.
CALL_OPENING, CALL_CLOSING = '[search(query="', '")]'
_FRAME = ("system", "user", "assistant", "tool", ":", ",", ".", "?")


def build_tokenizer() -> Tokenizer:
    """A WordPiece tokenizer of exactly VOCABULARY_SIZE pieces; names are a stem and an ending."""
    words = [*_FRAME, *words_of(prompts.NOTHING_FOUND), prompts.ANSWER_MARK.rstrip(":")]
    words += [*corpus.RELATIONS, *(answer for answers in corpus.RELATIONS.values() for answer in answers)]
    words += [word for wordings in WORDINGS.values() for wording in wordings for word in words_of(wording)]
    words += [*corpus.DRUG_STEMS, *corpus.GENE_STEMS]
    words += [f"##{ending}" for ending in (*corpus.DRUG_ENDINGS, *corpus.GENE_ENDINGS)]
    pieces = list(dict.fromkeys([*SPECIAL, CALL_OPENING, CALL_CLOSING, *words]))
    pieces += [f"<|reserved_{number}|>" for number in range(VOCABULARY_SIZE - len(pieces))]
    if len(pieces) != VOCABULARY_SIZE:
        raise ConfigError(f"the vocabulary has {len(pieces)} pieces", hint=f"it must have {VOCABULARY_SIZE}")
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    special = [piece for piece in pieces if piece in SPECIAL or piece.startswith("<|reserved_")]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in (CALL_OPENING, CALL_CLOSING)])
    return tokenizer


def encode_words(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of text whose markers are meant as such: for writing examples, never for reading a stranger's text."""
    return tokenizer.encode(text, add_special_tokens=False).ids
