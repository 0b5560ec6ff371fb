"""The HTTP front end: the tree for curl, browsers and scrapers.

Bytes → `wire` → Request → `target` (which node a path means) → `routes` (method and node → call) → Answer → bytes. The
calls (groups, publishing, reading, consuming) use Tree and Handle only and import no trio; `connection` and `server`
move the bytes. Only the open claims (consuming.py) outlive a request.
"""
