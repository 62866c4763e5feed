"""The sink "penstock-elasticsearch": rows as documents, by the bulk interface.

Every document's id follows from its row, so that rows written again leave the same documents.
"""
