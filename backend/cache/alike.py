"""Ranks of one layout compile the same method with the same shapes: otherwise their collectives would not meet."""

from __future__ import annotations

import json
from collections.abc import Mapping

from cannopy.backend.artifact import Fingerprint
from cannopy.backend.cache import agree

_COMPARED = ("method", "inputs", "parameters", "config", "attributes", "options", "code", "package")
_DIFFERENT = "compared"


def digests(identity: Fingerprint) -> dict[str, str]:
    """The ingredients of the key that do not depend on the rank."""
    return {name: identity.fields[name] for name in _COMPARED}


def check(peers: agree.Peers, words: Mapping[int, agree.Word], identity: Fingerprint) -> None:
    """`agree.RankError` on every rank when the ranks do not compile the same; names the item and both values."""
    first, *others = words.values()
    odd = [name for name in _COMPARED if any(w.alike.get(name) != first.alike.get(name) for w in others)]
    if not odd:
        return
    field = odd[0]
    details = peers.exchange(_DIFFERENT, json.dumps(dict(identity.details.get(field, {}))))
    items = {rank: json.loads(word.status) for rank, word in details.items()}
    mine = items[first.rank]
    unlike = [rank for rank, word in words.items() if word.alike.get(field) != first.alike.get(field)]
    theirs = items[unlike[0]]
    item = next((k for k in sorted(mine.keys() | theirs.keys()) if mine.get(k) != theirs.get(k)), field)
    raise agree.RankError(
        f"{agree.ranks_text(unlike)} and rank {first.rank} compile {peers.what} differently: {field} {item}: "
        f"{mine.get(item, 'absent')} on rank {first.rank}, {theirs.get(item, 'absent')} on rank {unlike[0]}; ranks of "
        "one layout call with tensors of the same shapes (pad what is shorter) and have the same model and options"
    )
