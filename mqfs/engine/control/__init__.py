"""What `ctl` does: settings and actions become changes of a group."""
