"""A directory on any file system of Spark: the metadata of an archive beside its Parquet files.

Small files are read and written by the file system classes of Hadoop, so that HDFS and object stores work too.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from typing import Any

from pyspark.sql import SparkSession


class Folder:
    """A directory of one of Hadoop's file systems."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        jvm: Any = spark._jvm
        self._jvm = jvm
        root = jvm.org.apache.hadoop.fs.Path(path)
        self._fs = root.getFileSystem(spark._jsc.hadoopConfiguration())
        self.scheme = str(self._fs.getUri().getScheme())
        self.path = str(self._fs.makeQualified(root).toString())

    def _at(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self.path}/{name}" if name else self.path)

    def under(self, name: str) -> str:
        return f"{self.path}/{name}"

    def exists(self, name: str = "") -> bool:
        return bool(self._fs.exists(self._at(name)))

    def names(self, name: str = "") -> list[str]:
        """Return the names in a directory; empty if it does not exist."""
        if not self.exists(name):
            return []
        return sorted(str(status.getPath().getName()) for status in self._fs.listStatus(self._at(name)))

    def files(self, pattern: str) -> list[str]:
        """Return the relative paths of the files that match a pattern of Hadoop. Characters of the directory's own path
        are not part of the pattern."""
        escaped = re.sub(r"[\[\]{}*?\\]", r"\\\g<0>", self.path)
        matches = self._fs.globStatus(self._jvm.org.apache.hadoop.fs.Path(f"{escaped}/{pattern}")) or []
        return sorted(str(status.getPath().toUri().getPath())[len(self._root) + 1 :] for status in matches)

    @property
    def _root(self) -> str:
        return str(self._at("").toUri().getPath())

    def make(self, name: str) -> None:
        self._fs.mkdirs(self._at(name))

    def remove(self, name: str) -> None:
        self._fs.delete(self._at(name), True)

    def rename(self, old: str, new: str) -> None:
        if not self._fs.rename(self._at(old), self._at(new)):
            raise OSError(f"cannot rename {self.under(old)} to {self.under(new)}")

    def read_json(self, name: str) -> Any:
        """Return the value of a file; None if it does not exist."""
        return json.loads(self.read_text(name)) if self.exists(name) else None

    def read_text(self, name: str) -> str:
        """Return the text of a file."""
        stream = self._fs.open(self._at(name))
        try:
            return bytes(stream.readAllBytes()).decode()
        finally:
            stream.close()

    def write_json(self, name: str, value: Any) -> None:
        """Write a file atomically, by a rename."""
        aside = f"{name}.new"
        self._write(aside, value)
        if self.exists(name):
            self.remove(name)
        self.rename(aside, name)

    def create_json(self, name: str, value: Any) -> bool:
        """Create a file, whole. If it exists, leave it as it is and return False. Of several processes at once, one
        creates it.

        Raises OSError.
        """
        aside = f"{name.rpartition('/')[0]}/{uuid.uuid4().hex}.new"
        self._write(aside, value)
        try:
            created = self._place(aside, name)
        finally:
            self.remove(aside)
        if not created and not self.exists(name):
            raise OSError(f"cannot create {self.under(name)}")
        return created

    def _place(self, aside: str, name: str) -> bool:
        """Give the file `aside` the name `name` by a link or a rename; return False if that name exists."""
        if self.scheme == "file":  # a rename replaces a file there; a rename of HDFS does not
            try:
                os.link(self._local(aside), self._local(name))
                return True
            except FileExistsError:
                return False
            except OSError:
                pass  # a file system without hard links, such as FAT
        return not self.exists(name) and bool(self._fs.rename(self._at(aside), self._at(name)))

    def _local(self, name: str) -> str:
        return str(self._at(name).toUri().getPath())

    def _write(self, name: str, value: Any) -> None:
        stream = self._fs.create(self._at(name), True)
        try:
            stream.write(bytearray(json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"))
        finally:
            stream.close()
