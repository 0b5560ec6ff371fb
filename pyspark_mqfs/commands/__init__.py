"""The commands of `mqfs spark`, a module each. Their command line is in mqfs/cli/spark.py."""
