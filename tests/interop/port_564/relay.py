"""relay.py PATH: carry standard input, which is a socket, to the unix socket PATH and back."""

import os
import select
import socket
import sys

there = socket.socket(socket.AF_UNIX)
there.connect(sys.argv[1])
while True:
    for source in select.select([0, there], [], [])[0]:
        data = os.read(0, 65_536) if source == 0 else there.recv(65_536)
        if not data:
            sys.exit()
        if source == 0:
            there.sendall(data)
        else:
            while data:
                data = data[os.write(0, data) :]
