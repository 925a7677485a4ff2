"""The measuring of search: merged shards are held against one index, planted papers are looked for, memory is the builder's."""

from pathlib import Path

from benchmarks.search import ask, build, equality, measure, planted
from environments.papersearchqa.invented import paper, write_corpus
from environments.search.paper_index import PaperIndex


def test_merged_shards_equal_one_index_and_the_comparison_could_fail(tmp_path: Path) -> None:
    found = equality(tmp_path, 900, 200)
    assert (found["merged_documents"], found["merged_shards"], found["merged_results_equal_one_index"]) == (900, 5, 1.0)
    assert float(str(found["merged_largest_score_difference"])) < 1e-5
    index = PaperIndex(tmp_path / "equality")
    # Questions about papers of a larger corpus are not answered by this one.
    assert ask(index, planted(900, 50))[0] >= 0.9
    assert ask(index, planted(90_000, 50))[0] < 0.1


def test_planted_questions_name_a_paper_that_answers_them() -> None:
    for one in planted(500, 20):
        number = int(one.source.removeprefix("invented-"))
        facts = [fact for fact in paper(7, number, 500).facts if one.question in fact.wordings]
        assert len(facts) == 1


def test_everything_is_measured_of_a_small_corpus(tmp_path: Path) -> None:
    found = measure(1000, tmp_path, {"merged_documents": 0})
    assert found["num_documents"] == 1000 and float(str(found["recall_at_3"])) >= 0.9
    for key in ("build_docs_per_second", "build_cpu_seconds", "queries_per_second", "queries_per_cpu_second", "server_queries_per_second"):
        assert float(str(found[key])) > 0.0
    assert 20e6 < float(str(found["peak_rss_bytes"])) < 8e9
    assert set(found["extrapolated_to"]) >= {"build_hours", "index_bytes", "queries_per_second"}  # pyright: ignore


def test_build_goes_on_in_a_process_of_its_own(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl", 1, 50)
    assert build(tmp_path / "corpus.jsonl", tmp_path / "index").about.num_documents == 50
    assert build(tmp_path / "corpus.jsonl", tmp_path / "index").about.num_documents == 50
