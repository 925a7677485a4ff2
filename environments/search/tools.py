"""The one tool of this task: search(query) over the abstracts.

A call of another tool, or with other arguments, is the policy's fault and is reported as None. Nothing the policy
writes can raise.
"""

from collections.abc import Sequence

from environments.search.index import SearchIndex
from environments.search.prompts import result_message
from stoa.chat.render import Message
from stoa.chat.tools import ToolCall

SEARCH = "search"


class SearchTool:
    """Runs calls against one index."""

    def __init__(self, abstracts: Sequence[str], top_k: int) -> None:
        self._abstracts = tuple(abstracts)
        self._index = SearchIndex(self._abstracts, top_k)

    def run(self, call: ToolCall) -> Message | None:
        """The tool message that answers a call, or None if the call is not one of `search(query=text)`."""
        query = call.arguments.get("query")
        if call.name != SEARCH or set(call.arguments) != {"query"} or not isinstance(query, str):
            return None
        return result_message([self._abstracts[number] for number in self._index.search(query)])
