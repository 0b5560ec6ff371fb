"""The columns, as Kafka's source has them: their names, types and which a user's own schema may choose.

Owns names and types only; it reads nothing. `topic` is a stream's path from the root, `offset` its sequence in the
group's log, `partition` and `timestampType` are always 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark_mqfs.options import OptionError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

HEADERS = "array<struct<key: string, value: binary>>"
COLUMNS = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
}


def ddl(*, headers: bool) -> str:
    """The schema of a read, as DDL."""
    columns = COLUMNS | ({"headers": HEADERS} if headers else {})
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())


def checked(schema: StructType, *, headers: bool) -> StructType:
    """A user's own schema, which may have fewer columns and another order. OptionError for any other difference."""
    from pyspark.sql.types import StructType

    whole = StructType.fromDDL(ddl(headers=True))
    assert isinstance(whole, StructType)
    ours = {field.name: field for field in whole.fields}
    for field in schema.fields:
        mine = ours.get(field.name)
        if mine is None or field.dataType.simpleString() != mine.dataType.simpleString():
            raise OptionError(
                f"the schema has {field.name} {field.dataType.simpleString()}; a choice of {ddl(headers=True)} is right"
            )
        if field.name == "headers" and not headers:
            raise OptionError("the schema has headers; with option includeHeaders true it is right")
    return schema


__all__ = ["COLUMNS", "HEADERS", "checked", "ddl"]
