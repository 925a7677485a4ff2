"""Questions about a world: two wordings for each fact, and the split by entity.

A held-out question asks about an entity that no training question mentions. Wordings use other words than the abstract
does, so that only the entity's name finds it.
"""

from environments.base import Question, Split
from environments.search.corpus import Entity

WORDINGS = {
    "inhibits": ("which enzyme does {} inhibit ?", "{} blocks which enzyme ?"),
    "treats": ("which disease does {} treat ?", "{} is given for which disease ?"),
    "causes": ("which effect does {} cause ?", "{} leads to which effect ?"),
    "encodes": ("which enzyme does {} encode ?", "{} is the code for which enzyme ?"),
    "marks": ("which tissue does {} mark ?", "{} is seen in which tissue ?"),
    "regulates": ("which pathway does {} regulate ?", "{} acts on which pathway ?"),
}


def build_questions(world: tuple[Entity, ...], num_held_out: int) -> tuple[Question, ...]:
    """All questions; those about the last `num_held_out` entities are held out."""
    questions: list[Question] = []
    for index, entity in enumerate(world):
        split: Split = "held_out" if index >= len(world) - num_held_out else "train"
        for relation, answer in entity.facts.items():
            for number, wording in enumerate(WORDINGS[relation]):
                question_id = f"{entity.id}-{relation}-{number}"
                questions.append(Question(question_id, wording.format(entity.name), (answer,), split, entity.id))
    return tuple(questions)
