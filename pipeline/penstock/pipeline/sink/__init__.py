"""The sink: rows of Spark to records of topics, exactly once or at least once."""
