"""The chaos harness: break a cluster on purpose and judge what it promised."""
