"""The languages of the files, as values: ctl lines, .put, .batch, formats of messages. Performs nothing."""
