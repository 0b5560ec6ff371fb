"""The FUSE front end: the tree as a mounted file system.

The server uses `FuseMount` of mount.py only. device_loop.py answers reads and writes on the device, handlers.py other
requests there, operations.py those of pyfuse3, which make, change, open or remove files. device.py has the waiting
requests, nodes.py the kernel's numbers of files, protocol.py the structs.
"""
