"""How documents of different lengths share packs."""

import bisect

import numpy as np


def best_fit(lengths: np.ndarray, order: np.ndarray, capacity: int, max_docs: int) -> list[list[int]]:
    """Packs documents: each goes into the fullest pack that it fits into.

    Args:    lengths of all documents in tokens; order in which they are packed, indices of lengths; capacity of a
             pack in tokens; max_docs in a pack
    Returns: the indices in each pack
    """
    packs = []
    unfilled = []  # (free tokens, number of the pack), sorted
    smallest = lengths.min()
    for i, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect.bisect_left(unfilled, (length, 0))
        if at < len(unfilled):
            free, number = unfilled.pop(at)
        else:
            free = capacity
            number = len(packs)
            packs.append([])
        packs[number].append(i)
        free -= length
        if free >= smallest and len(packs[number]) < max_docs:
            bisect.insort(unfilled, (free, number))
    return packs
