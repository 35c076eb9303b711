"""The subcommands of `dips`: one file for each, registered in dips/cli.py."""
