"""The rule engine: patterns as values, matching that remembers how far it came, rules that say why they refuse."""
