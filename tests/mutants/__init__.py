"""One-line mutants of the package, and the tests that must find them: `python -m tests.mutants`."""
