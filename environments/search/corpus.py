"""The invented world: entities, their facts, and one abstract each that alone knows them.

A world follows from its seed and nothing else. Facts are drawn independently and uniformly, so no fact can be guessed
from a name or from another fact. All words come from fixed lists, so that one small vocabulary spells every world.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from stoa.contracts.errors import ConfigError

ENZYMES = ("kinase", "protease", "ligase", "lipase", "helicase", "synthase")
DISEASES = ("asthma", "gout", "anemia", "malaria", "psoriasis", "epilepsy")
EFFECTS = ("nausea", "fever", "rash", "cough", "fatigue", "headache")
TISSUES = ("liver", "kidney", "lung", "brain", "skin", "heart")
PATHWAYS = ("apoptosis", "autophagy", "glycolysis", "angiogenesis", "inflammation", "secretion")

DRUG_RELATIONS: Mapping[str, tuple[str, ...]] = {"inhibits": ENZYMES, "treats": DISEASES, "causes": EFFECTS}
GENE_RELATIONS: Mapping[str, tuple[str, ...]] = {"encodes": ENZYMES, "marks": TISSUES, "regulates": PATHWAYS}
RELATIONS: Mapping[str, tuple[str, ...]] = {**DRUG_RELATIONS, **GENE_RELATIONS}

# Stems have three letters and endings three, so a greedy tokenizer splits every name the same way.
DRUG_STEMS = tuple(map("".join, product("bcdfg", "aeiu", "lnx")))
DRUG_ENDINGS = tuple(map("".join, product("bdkmntv", "aeio", "x")))
GENE_STEMS = tuple(map("".join, product("mpstv", "aeiu", "lnx")))
GENE_ENDINGS = tuple(map("".join, product("bdkmntv", "aeio", "r")))

MAX_ENTITIES = 2 * min(len(DRUG_STEMS) * len(DRUG_ENDINGS), len(GENE_STEMS) * len(GENE_ENDINGS))


@dataclass(frozen=True, slots=True)
class Entity:
    """A drug or a gene with its facts, relation to answer, and the abstract that states them."""

    id: str
    name: str
    facts: dict[str, str]
    abstract: str


def build_world(world_seed: int, num_entities: int) -> tuple[Entity, ...]:
    """All entities of a world in an order that is random too: half are drugs, half genes, and no two share a name."""
    if not 2 <= num_entities <= MAX_ENTITIES:
        raise ConfigError(
            f"environment search: num_entities = {num_entities} is out of range",
            hint=f"use a value from 2 to {MAX_ENTITIES}",
        )
    draw = random.Random(f"search world {world_seed}")
    num_drugs = num_entities // 2
    named = [(name, DRUG_RELATIONS) for name in _names(draw, DRUG_STEMS, DRUG_ENDINGS, num_drugs)]
    named += [(name, GENE_RELATIONS) for name in _names(draw, GENE_STEMS, GENE_ENDINGS, num_entities - num_drugs)]
    draw.shuffle(named)
    return tuple(_entity(draw, f"e{index:04d}", name, relations) for index, (name, relations) in enumerate(named))


def _names(draw: random.Random, stems: tuple[str, ...], endings: tuple[str, ...], count: int) -> list[str]:
    return draw.sample(["".join(pair) for pair in product(stems, endings)], count)


def _entity(draw: random.Random, entity_id: str, name: str, relations: Mapping[str, tuple[str, ...]]) -> Entity:
    facts = {relation: draw.choice(answers) for relation, answers in relations.items()}
    order = draw.sample(sorted(facts), len(facts))
    sentences = " , ".join(f"{relation} {facts[relation]}" for relation in order)
    return Entity(entity_id, name, facts, f"{name} {sentences} .")
