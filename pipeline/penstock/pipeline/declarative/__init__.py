"""Spark Declarative Pipelines over topics: projects made, checked, drawn, and run once or for good.

The format is Spark's own, ``spark-pipeline.yml`` with definitions in Python and SQL; there is none
of ours. Importing this needs no Spark.
"""
