"""The tools of the shell, mq(1), mq-work(1) and pin(1), and their common parts; they use files of a tree only."""
