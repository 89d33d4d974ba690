"""Compile cache: key, manifest, store. `cannopy.backend.build.lookup` is the way in."""

from cannopy.backend.cache.key import differences, fingerprint
from cannopy.backend.cache.store import Entry, default_cache_dir, list_entries, prune, verify

__all__ = ["Entry", "default_cache_dir", "differences", "fingerprint", "list_entries", "prune", "verify"]
