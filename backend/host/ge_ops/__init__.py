"""CPU semantics of GE op types, one family per file; `table.OPS` lists them all."""
