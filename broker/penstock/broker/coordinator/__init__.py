"""Group coordination over __consumer_offsets."""
