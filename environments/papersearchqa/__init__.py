"""PaperSearchQA (arXiv 2601.18207): questions about biomedical papers, answered by searching their abstracts.

Its data are built once by `stoa search`; a small invented set of the same form is shipped. Finding papers is
`environments.search`'s business.
"""
