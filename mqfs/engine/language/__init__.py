"""The languages of the files, parsed into values: ctl lines, .put, .batch, message formats. Nothing is executed."""
