"""mq(1): put, peek, ls, stat, purge, redrive, ctl and top: thin commands over the files of a tree."""
