"""The `fedtailor` command: one file per group of subcommands, registered in `main`."""
