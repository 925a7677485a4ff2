"""An invented set of the task's form, of any size: `python -m environments.papersearchqa.invented FOLDER [--papers N]`.

It writes a corpus and questions in the published columns. Drugs, diseases, proteins, genes and metabolites are made of
syllables; none is real, and there is no person in it. Every paper follows from the seed and its number alone, so a corpus
streams out in constant memory. A paper is about one drug in one disease; both occur in other papers, together in no other.
"""

import argparse
import gzip
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from environments.papersearchqa.cleaning import Report, clean
from environments.papersearchqa.questions import SMALL, SMALL_CORPUS, write_questions
from environments.search.source import Document

SMALL_PAPERS: Final = 2000
PAPERS_A_DRUG: Final = 8
_SYLLABLES: Final = tuple(consonant + vowel for consonant in "bdfgklmnprstvxyz" for vowel in "aeiou")
_NAMES: Final = len(_SYLLABLES) ** 3
_STRIDE: Final = 215_483
"""Odd and no multiple of 5, so multiplying by it permutes the names: neighbours do not look alike."""
_SPELLED: Final = ("alpha", "beta", "gamma", "kappa")
_GREEK: Final = "\u03b1\u03b2\u03b3\u03ba"
_TISSUES: Final = ("hepatic", "renal", "pulmonary", "cardiac", "gastric", "cutaneous", "retinal", "splenic", "muscular", "neural")
_DESIGNS: Final = (
    "a randomised trial", "a cohort study", "a case-control study", "an animal study", "a cell-based screen", "a crossover trial",
)  # fmt: skip
_TOPICS: Final = (
    "oxidative stress", "immune tolerance", "lipid transport", "calcium signalling", "cell adhesion", "wound healing", "energy balance",
    "membrane repair", "protein folding", "bone turnover", "blood flow", "nerve conduction", "glucose uptake", "hormone release",
)  # fmt: skip
_VERBS: Final = ("lowered", "raised", "left unchanged", "delayed", "restored", "doubled", "halved")
_MEASURES: Final = (
    "serum markers", "survival", "tissue damage", "inflammatory scores", "cell counts", "relapse rates", "hospital stays", "symptom scores",
)  # fmt: skip
_NUM_TERMS: Final = 60_000
_SHIPPED: Final = (("train", 150, 2), ("test", 100, 2), ("transfer", 40, 1))
"""Split, papers that are asked about, questions a paper: 300, 200 and 40."""


@dataclass(frozen=True, slots=True)
class Fact:
    """What a question asks: two wordings and a third for the transfer set, the accepted answers, the category."""

    wordings: tuple[str, str, str]
    answers: tuple[str, ...]
    category: tuple[int, str]


@dataclass(frozen=True, slots=True)
class Paper:
    """One invented paper with its facts."""

    document: Document
    title: str
    facts: tuple[Fact, ...]


def name(kind: int, number: int) -> str:
    """The invented name of an entity; different for every number below 512,000 of one kind."""
    place = (number * _STRIDE + kind * 99_991) % _NAMES
    size = len(_SYLLABLES)
    return _SYLLABLES[place // size**2] + _SYLLABLES[place // size % size] + _SYLLABLES[place % size]


def paper(seed: int, number: int, num_papers: int) -> Paper:
    """Paper `number` of a corpus of `num_papers`."""
    num_drugs = max(1, num_papers // PAPERS_A_DRUG)
    drug_number, visit = number % num_drugs, number // num_drugs
    disease_number = (drug_number * 31 + visit) % max(2 * PAPERS_A_DRUG, num_drugs // 2)
    draw = random.Random(f"paper {seed} {drug_number} {disease_number}")
    drug = name(1, drug_number) + ("mib", "stat", "fen", "zole", "vir")[drug_number % 5]
    disease = f"{_TISSUES[disease_number % len(_TISSUES)]} {name(2, disease_number)}{('osis', 'itis', 'emia')[disease_number % 3]}"
    greek = draw.randrange(len(_GREEK))
    protein, code = name(3, draw.randrange(_NAMES)) + "in", f"{_letters(draw)}-{{}}{draw.randint(2, 9)}"
    gene = f"{_letters(draw)}{draw.randint(1, 99)}"
    metabolite = name(5, draw.randrange(_NAMES)) + "ine"
    facts = _facts(drug, disease, (protein, code.format(_SPELLED[greek])), gene, metabolite)
    title = f"{drug} in {disease}: {draw.choice(_DESIGNS)} of {draw.choice(_TOPICS)}"
    pick, count = draw.choice, draw.randint
    sentences = [
        f"{disease} is a disorder of {pick(_TOPICS)} in which {_terms(draw, 3)} and {pick(_TOPICS)} are impaired.",
        f"We carried out {pick(_DESIGNS)} with {count(12, 900)} subjects over {count(2, 60)} months.",
        f"{drug} blocked {protein} ({code.format(_GREEK[greek])}) and {pick(_VERBS)} {pick(_MEASURES)} (p = 0.0{count(1, 49):02d}).",
        f"Compared with {name(1, draw.randrange(num_drugs))}stat, {pick(_MEASURES)} were {pick(_VERBS)} by {count(3, 80)} percent.",
        f"Carriers of mutations in {gene} did not respond, as sequencing of {_terms(draw, 4)} showed.",
        f"Levels of {metabolite} in plasma rose in those who responded, while {_terms(draw, 5)} did not change.",
        f"{pick(_TOPICS).capitalize()} and {pick(_TOPICS)} {pick(_VERBS)} {pick(_MEASURES)} in {_terms(draw, 6)}.",
        f"Secondary outcomes included {_terms(draw, 8)}, {pick(_MEASURES)} and {pick(_MEASURES)}.",
        f"In conclusion, {drug} may serve patients with {disease}; effects on {_terms(draw, 4)} need further study.",
    ]
    middle = sentences[1:-1]
    draw.shuffle(middle)
    text = " ".join([sentences[0], *middle, sentences[-1]])
    return Paper(Document(f"invented-{number:07d}", f"TITLE: {title}. ABSTRACT: {text[0].upper()}{text[1:]}"), title, facts)


def papers(seed: int, num_papers: int) -> Iterator[Paper]:
    """A whole corpus."""
    return (paper(seed, number, num_papers) for number in range(num_papers))


def rows(one: Paper, fact: Fact, wording: int) -> dict[str, object]:
    """A question in the published columns."""
    return {
        "question_original": fact.wordings[0],
        "question": fact.wordings[wording],
        "answer": fact.answers[0],
        "golden_answers": list(fact.answers),
        "is_paraphrased": wording > 0,
        "cat_num": fact.category[0],
        "cat": fact.category[1],
        "pmid": one.document.id,
        "paper_title": one.title,
    }


def questions(seed: int, num_papers: int) -> dict[str, list[dict[str, object]]]:
    """The questions of a corpus by split: each split asks about papers of its own."""
    draw, first = random.Random(f"questions {seed}"), 0
    found: dict[str, list[dict[str, object]]] = {}
    for split, num_asked, num_facts in _SHIPPED:
        asked = found.setdefault(split, [])
        for number in range(first, first + num_asked):
            # Spread over the corpus by a stride, so that papers of one drug are not asked about together.
            one = paper(seed, number * 997 % num_papers, num_papers)
            wording = 2 if split == "transfer" else draw.randrange(2)
            asked += [rows(one, fact, wording) for fact in draw.sample(one.facts, num_facts)]
        first += num_asked
    return found


def write_corpus(path: Path, seed: int, num_papers: int) -> None:
    """Write a corpus as JSON lines, packed if the name ends with .gz."""
    with gzip.GzipFile(path, "wb", mtime=0) if path.suffix == ".gz" else path.open("wb") as file:
        for one in papers(seed, num_papers):
            line = json.dumps({"id": one.document.id, "contents": one.document.contents}, ensure_ascii=False) + "\n"
            file.write(line.encode())


def write_small(folder: Path = SMALL) -> str:
    """Write the shipped set; returns the id of its questions."""
    folder.mkdir(parents=True, exist_ok=True)
    write_corpus(folder / SMALL_CORPUS.name, 0, SMALL_PAPERS)
    found, report = questions(0, SMALL_PAPERS), Report()
    built = clean({"train": [*found["train"]], "held_out": [*found["test"]], "transfer": [*found["transfer"]]}, report)
    return write_questions(folder, built, report.as_json())


def _facts(drug: str, disease: str, protein: tuple[str, str], gene: str, metabolite: str) -> tuple[Fact, ...]:
    return (
        Fact(
            (
                f"Which protein does {drug} block in {disease}?",
                f"In patients with {disease}, {drug} acts by switching off which protein?",
                f"What is the molecular target of {drug} in {disease}?",
            ),
            protein,
            (3, "Protein function & signalling"),
        ),
        Fact(
            (
                f"Mutations in which gene make {disease} resistant to {drug}?",
                f"Which gene is altered where {drug} fails against {disease}?",
                f"Name the gene behind resistance of {disease} to {drug}.",
            ),
            (gene, f"{gene} gene"),
            (1, "Genetic mutations"),
        ),
        Fact(
            (
                f"Which metabolite rises in plasma when {disease} responds to {drug}?",
                f"What circulating compound marks a response of {disease} to {drug}?",
                f"Which plasma marker tells that {drug} works in {disease}?",
            ),
            (metabolite,),
            (6, "Biomarkers & diagnostics"),
        ),
    )


def _letters(draw: random.Random) -> str:
    return "".join(draw.choice("BCDFGKLMNPQRSTVWXZ") for _ in range(3))


def _terms(draw: random.Random, count: int) -> str:
    """Words of a vocabulary with a long tail, as real abstracts have it."""
    return " ".join(f"{name(7, int(_NUM_TERMS ** draw.random()))}{('al', 'ic', 'oid')[draw.randrange(3)]}" for _ in range(count))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a set to a folder; the shipped one with --small."""
    parser = argparse.ArgumentParser(description="Write an invented corpus and questions about it.")
    parser.add_argument("folder", type=Path, nargs="?", default=SMALL)
    parser.add_argument("--papers", type=int, default=SMALL_PAPERS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="write the set that is shipped")
    asked = parser.parse_args(arguments)
    if asked.small:
        write_small(asked.folder)
        return
    asked.folder.mkdir(parents=True, exist_ok=True)
    write_corpus(asked.folder / "corpus.jsonl", asked.seed, asked.papers)
    for split, found in questions(asked.seed, asked.papers).items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found)
        (asked.folder / f"{split}.jsonl").write_text(lines, "utf-8")
    sys.stderr.write(
        f"{asked.papers:,} invented papers and their questions are in {asked.folder}; next:\n"
        f"  stoa search questions {asked.folder} {asked.folder}/questions --transfer {asked.folder}/transfer.jsonl\n"
        f"  stoa search index {asked.folder}/corpus.jsonl {asked.folder}/index\n"
    )


if __name__ == "__main__":
    main()
