"""Where groups keep their logs: in memory or on disk, behind the seam `Store` of mqfs/store/api.py."""
