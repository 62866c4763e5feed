"""Sources and sinks for other systems, each a format of Spark's of its own.

Importing this needs none of their libraries. Spark finds them by the modules at the top that are
named ``pyspark_penstock_`` something.
"""
