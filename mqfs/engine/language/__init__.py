"""What is written to files, as values: ctl lines, .put, .batch, formats of messages. Carries nothing out."""
