"""One process of the cache tests: ``python -m tests.backend.child CACHE_DIR`` prints a JSON line.

The package digest is pinned, so that a file of this package saved while the
tests run is not taken for a change.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cannopy.backend.cache import key as _  # noqa: F401  the module, so that it can be patched below
from cannopy.backend.options import BuildOptions

sys.modules["cannopy.backend.cache.key"].package_digest = lambda: "pinned"


def main() -> None:
    """Compile `Tiny`, run it twice, print what happened."""
    from torch._dynamo.utils import counters

    from cannopy.backend.host.activate import activate
    from tests.backend.programs import check_same_as_eager, compile_tiny, tiny

    (cache_dir,) = sys.argv[1:]
    activate()
    model = tiny()
    compiled, x, cache = compile_tiny(model, BuildOptions(cache_dir=Path(cache_dir)))
    for _i in range(2):
        check_same_as_eager(compiled, model, x, cache)
    graphs = counters["stats"]["unique_graphs"]
    print(json.dumps({**compiled.report["cache"], "graphs": graphs}))


if __name__ == "__main__":
    main()
