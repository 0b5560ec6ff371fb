"""What the tools of the shell share, and mq(1), mq-work(1), pin(1) themselves: files of a tree only."""
