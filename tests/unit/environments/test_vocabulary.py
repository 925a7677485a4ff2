"""The shipped tokenizer spells every world, and is the one the code makes."""

from itertools import product

import pytest

from environments.search import corpus
from environments.search.corpus import build_world
from environments.search.questions import build_questions
from environments.search.vocabulary import UNKNOWN, build_tokenizer


@pytest.mark.parametrize(
    ("stems", "endings"),
    [(corpus.DRUG_STEMS, corpus.DRUG_ENDINGS), (corpus.GENE_STEMS, corpus.GENE_ENDINGS)],
)
def test_every_name_is_a_stem_and_an_ending(stems: tuple[str, ...], endings: tuple[str, ...]) -> None:
    tokenizer = build_tokenizer()
    for stem, ending in product(stems, endings):
        assert tokenizer.encode(stem + ending).tokens == [stem, f"##{ending}"]


@pytest.mark.parametrize("world_seed", [0, 1_000_000])
def test_no_word_of_a_world_is_unknown_and_text_reads_back(world_seed: int) -> None:
    tokenizer = build_tokenizer()
    world = build_world(world_seed, 600)
    for text in [e.abstract for e in world] + [q.text for q in build_questions(world, 200)]:
        encoded = tokenizer.encode(text)
        assert UNKNOWN not in encoded.tokens
        assert tokenizer.decode(encoded.ids) == text


def test_shipped_tokenizer_is_the_one_the_code_makes(tokenizer_json: bytes) -> None:
    assert tokenizer_json.decode() == build_tokenizer().to_str(pretty=True) + "\n"
    assert build_tokenizer().get_vocab_size() == 256
