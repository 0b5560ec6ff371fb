"""The FUSE front end: the tree as a mounted file system.

The server uses `mount.FuseMount` only. `device_loop` answers reads and writes on the `device`, `handlers` other
requests there, `operations` those of pyfuse3, which make, change, open or remove files. `parked` has the waiting
requests, `nodes` the kernel's numbers of files, `identity` users, `processes` the ends of processes, `protocol` the
structs.
"""
