"""mq-work(1): a command for each message that a consumer hands out, acknowledged by its exit code, using files only."""
