"""The columns: names and types of Kafka's source, and the check of a user's schema.

`topic` is a stream's path from the root, `offset` its sequence in the group's log. `partition` and `timestampType` are
always 0.
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


def all_columns(*, headers: bool) -> StructType:
    """Return the schema with all columns; with `headers`, the column of headers too."""
    return StructType([*COLUMNS, HEADERS] if headers else [*COLUMNS])


def check_columns(schema: StructType, *, headers: bool) -> StructType:
    """Return the user's schema, which may have some of the columns in any order. Raises OptionError for other
    differences."""
    ours = {field.name: field.dataType.simpleString() for field in all_columns(headers=True).fields}
    for field in schema.fields:
        kind = field.dataType.simpleString()
        if ours.get(field.name) != kind:
            raise OptionError(f"schema: invalid column {field.name + ' ' + kind!r} (expected some of: {_shown(ours)})")
        if field.name == "headers" and not headers:
            raise OptionError("schema: column headers needs option includeHeaders true")
    return schema


def _shown(columns: dict[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())
