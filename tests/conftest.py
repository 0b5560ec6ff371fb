"""What holds for every test."""

from __future__ import annotations

import signal

# `nohup script/test &` starts us with these ignored, and a child would go on ignoring them; but tests interrupt their
# children. What has a handler is the default again in a child.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)
