"""Which sequences share a packed row of the trainer, within a budget of tokens.

Positions, masks and the forward pass of a row are the trainer's.
"""

from collections.abc import Sequence


def pack(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Put sequences into rows of at most `budget_tokens`: first fit, longest first, ties by index.

    A sequence longer than the budget gets a row of its own. The result depends on the lengths alone; it lists each index
    once, rising within a row. First fit of falling lengths needs at most 11/9 of the fewest possible rows, and one.

    Raises ValueError for a length or a budget below 1.
    """
    if budget_tokens < 1 or any(length < 1 for length in lengths):
        raise ValueError(f"sequences of {min(lengths, default=0)} tokens cannot be packed into rows of {budget_tokens}")
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, free in enumerate(room) if lengths[index] <= free), None)
        if row is None:
            rows.append([])
            room.append(budget_tokens)
            row = len(rows) - 1
        rows[row].append(index)
        room[row] -= lengths[index]
    return [sorted(row) for row in rows]
