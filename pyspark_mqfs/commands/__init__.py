"""What the commands of `mqfs spark` do, a module each. Their words and options are mqfs/cli/spark.py's."""
