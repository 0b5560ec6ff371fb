"""Metrics that Prometheus expects of every process: its time, memory, descriptors and start."""

from __future__ import annotations

import os
import resource
import time

from mqfs.http.exposition import Family

FAMILIES = (
    Family("process_cpu_seconds_total", "counter", "User and system time."),
    Family("process_resident_memory_bytes", "gauge", "Resident memory."),
    Family("process_virtual_memory_bytes", "gauge", "Virtual memory."),
    Family("process_open_fds", "gauge", "Open descriptors."),
    Family("process_max_fds", "gauge", "How many there may be."),
    Family("process_start_time_seconds", "gauge", "UNIX time of its start."),
)


def values() -> tuple[float, ...]:
    """One of each family."""
    with open("/proc/self/statm") as file:
        virtual, resident = (int(word) * resource.getpagesize() for word in file.read().split()[:2])
    return (
        time.process_time(),
        resident,
        virtual,
        len(os.listdir("/proc/self/fd")) - 1,  # without that of the list itself
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        _started(),
    )


def _started() -> float:
    with open("/proc/self/stat") as file:
        after_name = file.read().rpartition(")")[2].split()
    since_boot = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return round(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot, 2)
