"""The command line: mqfs serve, check, bench, spark. Imports what a command needs when it runs."""
