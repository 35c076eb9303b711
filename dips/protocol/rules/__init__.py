"""The rules of the outer step: tables of pure functions, by the values of `shared.outer` (docs/guides/rules.md)."""
