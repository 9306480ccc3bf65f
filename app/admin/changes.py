"""The short spellings of a delta: fields, orders, block tables and blocks, each as what differs from the frame before.

Each can be applied twice without harm: what is said is the value after the change, or where it ends up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from app.encode import Json, block_code, block_owner
from engine.core.stats import Fold


def changed_fields(before: object, after: object) -> Json:
    """The fields of `after` that differ; both are objects with the same fields."""
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    return {name: value for name, value in after.items() if name not in before or before[name] != value}


def order_change(name: str, before: Sequence[str], after: Sequence[str]) -> Json:
    """How a list of ids came about from what is left of the one before.

    `{name}_moves`: `[id in front or null, id, ...]` for each run of new ids, in order. `{name}_order`, the whole list,
    where those that stayed have changed places. Nothing where only some have left.
    """
    if before == after:
        return {}
    stay = set(before).intersection(after)
    left = [each for each in before if each in stay]
    if left != [each for each in after if each in stay]:
        return {f"{name}_order": list(after)}
    moves: list[list[str | None]] = []
    in_front: str | None = None
    is_run = False
    for each in after:
        if each in stay:
            is_run = False
        elif is_run:
            moves[-1].append(each)
        else:
            moves.append([in_front, each])
            is_run = True
        in_front = each
    return {f"{name}_moves": moves} if moves else {}


def table_tail(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """`[n, block, ...]`: the first n blocks stay, and these follow; empty where all is the same."""
    same = min(len(before), len(after))
    if before[:same] != after[:same]:
        same = next(i for i in range(same) if before[i] != after[i])
    elif len(before) == len(after):
        return []
    return [same, *after[same:]]


def block_runs(fold: Fold, block_ids: Iterable[int]) -> list[list[int]]:
    """`[first block, how many, state, references, place of the owner among those that run or -1]` of each run."""
    places = {seq_id: place for place, seq_id in enumerate(fold.running)}  # who holds blocks runs
    runs: list[list[int]] = []
    for block_id in sorted(block_ids):
        owner = block_owner(fold, block_id)
        what = [block_code(fold, block_id), fold.ref_counts[block_id], -1 if owner is None else places[owner]]
        if runs and runs[-1][0] + runs[-1][1] == block_id and runs[-1][2:] == what:
            runs[-1][1] += 1
        else:
            runs.append([block_id, 1, *what])
    return runs
