"""What a source says of ``.schema(...)`` where its columns are not the reader's to choose."""

from __future__ import annotations

from pyspark.sql.types import StructType

from penstock.pipeline.errors import OptionError


def refuse_other(given: StructType, own: StructType, where: str) -> None:
    """Raises OptionError for a schema that is not the source's own. Spark takes the given one for
    that of the rows, whatever comes: values would stand under the wrong columns.

    ``where`` says in the message whose it is, such as "the penstock source".
    """
    if given != own:
        raise OptionError(
            f"{where} has its own schema, {own.simpleString()}, and {given.simpleString()} was "
            "given: leave .schema() out, and select or cast what was read"
        )
