"""The FUSE front end: the tree as a mounted file system.

`mount.FuseMount` is all that the server needs. `device_loop` answers data, lookups and listings on the device,
`operations` what makes, changes, opens or removes files through pyfuse3; `nodes` is what both look up in, `identity`
says on whose behalf, `processes` when a process has ended, `protocol` the structs.
"""
