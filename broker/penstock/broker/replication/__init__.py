"""Leaders push, followers append: the shell around the replica state machines."""
