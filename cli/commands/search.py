"""`stoa search fetch | questions | index | ask`: the data of PaperSearchQA, fetched, cleaned, indexed and looked at."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from cli import say
from cli.arguments import AsJson
from cli.examples import epilogue

search = App(
    name="search", help="Fetch, clean, index and look at the papers and questions of PaperSearchQA.", help_epilogue=epilogue("search")
)


@search.command
def fetch(name: str, folder: Path, /, *, endpoint: Annotated[str, Parameter(show_default=False)] = "") -> None:
    """Fetch a hub's data set, OWNER/NAME@COMMIT, into a folder; goes on where it was cut short.

    Parameters
    ----------
    name
        Data set with its commit pinned, for example jmhb/PaperSearchQA@COMMIT.
    folder
        Where its parquet and JSONL files go.
    endpoint
        Address of another hub.
    """
    from environments.papersearchqa.cleaning import fetch as fetch_data

    fetch_data(name, folder, endpoint=endpoint or None)
    say.talk(f"{name} is in {folder}")


@search.command
def questions(source: Path, folder: Path, /, *, transfer: Path | None = None, as_json: AsJson = False) -> None:
    """Clean questions and write them to a folder; refuses while training and exam share a question or a paper.

    Parameters
    ----------
    source
        Folder with parquet or JSONL files of the train and test split.
    folder
        Where the questions and the report of what was removed go.
    transfer
        File or folder of another benchmark's questions, for example BioASQ's.
    """
    import json

    from environments.papersearchqa.cleaning import build_questions

    questions_id, report = build_questions(source, folder, transfer)
    if as_json:
        say.data(json.dumps({"questions_id": questions_id, **report.as_json()}, indent=2))
        return
    for split in report.read:
        say.talk(f"{split}: {report.read[split]:,} read, {report.kept[split]:,} kept")
    for reason, count in sorted(report.removed.items()):
        say.talk(f"  removed {count:,} of {reason}")
    say.talk(f"  {report.answers_removed:,} accepted answers said nothing and were dropped")
    say.talk(f'questions_id = "{questions_id}"')


@search.command
def index(corpus: Path, folder: Path, /, *, shard: int = 0, as_json: AsJson = False) -> None:
    """Index a corpus of any size for search; goes on where it was stopped.

    Parameters
    ----------
    corpus
        A .jsonl, .jsonl.gz or .jsonl.zst file of {"id", "contents"}.
    folder
        Where the index goes.
    shard
        Documents that are counted in memory at a time, about 4 KB each; 0 for 131,072.
    """
    import json
    from dataclasses import asdict

    from cli.live.bar import Bar
    from environments.search.building import DOCUMENTS_A_SHARD, build_index
    from stoa.contracts.errors import UsageError

    if shard < 0:
        raise UsageError(f"--shard {shard}: give a number of documents", hint="0 for the default")
    with Bar() as bar:
        about = build_index(corpus, folder, documents_a_shard=shard or DOCUMENTS_A_SHARD, progress=bar.show)
    if as_json:
        say.data(json.dumps(asdict(about), indent=2))
        return
    skipped = f", {about.num_skipped:,} lines that were none" if about.num_skipped else ""
    say.talk(f"{about.num_documents:,} documents in {say.counted(about.num_shards, 'shard')}{skipped}")
    say.talk(f'index_id = "{about.index_id}"')


@search.command
def ask(folder: str, query: str, /, *, top: int = 3, verify: bool = False, as_json: AsJson = False) -> None:
    """Search an index, or a search server, as the policy would.

    Parameters
    ----------
    folder
        Folder of an index, or the address of a search server.
    query
        Words to look for.
    top
        How many papers to show.
    verify
        Check every byte of the index first.
    """
    import json
    from dataclasses import asdict

    from environments.search.paper_index import PaperIndex
    from environments.search.retrieval import MOST_PASSAGES, open_retriever
    from stoa.contracts.errors import UsageError

    if not 1 <= top <= MOST_PASSAGES:
        raise UsageError(f"--top {top}: from 1 to {MOST_PASSAGES}")
    if verify and "://" not in folder:
        PaperIndex(Path(folder).expanduser(), verify=True)
    found = open_retriever(folder).search(query, top)
    if as_json:
        say.data(json.dumps({"query": query, "passages": [asdict(passage) for passage in found]}, indent=2))
        return
    for rank, passage in enumerate(found, 1):
        say.talk(f"[{rank}] {passage.score:.2f} {passage.id}\n    {passage.contents[:300]}")
    if not found:
        say.talk("nothing was found")
