"""The subcommands of `dips`: one file for each, put together by dips/cli.py."""
