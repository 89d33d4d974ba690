"""Cuts of a fused graph over the dies of a `fx_passes.parallel.Layout`: one kind of cut per file."""
