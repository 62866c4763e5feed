"""Pure: replicas, leader epochs, producer state, groups."""
