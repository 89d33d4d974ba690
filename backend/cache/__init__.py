"""Compile cache: key, manifest, store. `cannopy.backend.build.lookup` is the way in."""

from cannopy.backend.cache.folder import default_cache_dir
from cannopy.backend.cache.key import differences, fingerprint
from cannopy.backend.cache.listing import Entry, list_entries, verify
from cannopy.backend.cache.prune import prune

__all__ = ["Entry", "default_cache_dir", "differences", "fingerprint", "list_entries", "prune", "verify"]
