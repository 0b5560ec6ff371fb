"""mq-cat(1): the messages of several streams in the order they were written, using files only."""
