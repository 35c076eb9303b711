"""The rules of the outer step: pure functions in tables, by the words of `shared.outer` (docs/guides/rules.md)."""
