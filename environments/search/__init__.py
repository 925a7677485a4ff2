"""A miniature of PaperSearchQA: an invented biomedical world, questions about it, and a search tool over its abstracts."""
