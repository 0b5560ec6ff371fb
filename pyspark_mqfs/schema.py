"""The columns, as Kafka's source has them: their names, types and which a user's own schema may choose.

Owns names and types only; it reads nothing. `topic` is a stream's path from the root, `offset` its sequence in the
group's log, `partition` and `timestampType` are always 0.
"""

from __future__ import annotations

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pyspark_mqfs.options import OptionError

HEADERS = StructField(
    "headers", ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
)
COLUMNS = (
    StructField("key", BinaryType()),
    StructField("value", BinaryType()),
    StructField("topic", StringType()),
    StructField("partition", IntegerType()),
    StructField("offset", LongType()),
    StructField("timestamp", TimestampType()),
    StructField("timestampType", IntegerType()),
)


def whole(*, headers: bool) -> StructType:
    """The schema of a read."""
    return StructType([*COLUMNS, HEADERS] if headers else [*COLUMNS])


def checked(schema: StructType, *, headers: bool) -> StructType:
    """A user's own schema, which may have fewer columns and another order. OptionError for any other difference."""
    ours = {field.name: field.dataType.simpleString() for field in whole(headers=True).fields}
    for field in schema.fields:
        kind = field.dataType.simpleString()
        if ours.get(field.name) != kind:
            raise OptionError(f"the schema has {field.name} {kind}; a choice of {_shown(ours)} is right")
        if field.name == "headers" and not headers:
            raise OptionError("the schema has headers; with option includeHeaders true it is right")
    return schema


def _shown(columns: dict[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())


__all__ = ["COLUMNS", "HEADERS", "checked", "whole"]
