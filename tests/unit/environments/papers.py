"""Small corpora for tests of the index: JSON lines of documents whose words are drawn with a long tail."""

import json
import random
from pathlib import Path

WORDS = [f"w{number}" for number in range(400)]


def texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(WORDS[int(400 ** draw.random()) - 1] for _ in range(draw.randint(5, 60))) for _ in range(count)]


def write_corpus(path: Path, contents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": f"p{number}", "contents": text}) + "\n" for number, text in enumerate(contents)))
    return path
