"""Formats and numbers as files: what was written once is read by every later version, or a change is meant and seen.

`make()` of each module returns today's files by name. `python -m tests.golden` says which differ from those in `data/`;
with `--write` they are written anew: read the difference, and say in the commit why the format or the numbers changed.
"""
