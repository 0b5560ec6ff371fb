"""The command line: mqfs serve, check, bench, spark. A command imports its modules when it runs."""
